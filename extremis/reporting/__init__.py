"""`extremis report`: one HTML page about runs, made from what they left in storage."""
