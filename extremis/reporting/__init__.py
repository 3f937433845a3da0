"""`extremis report`: one HTML page about runs, made from their files in storage."""
