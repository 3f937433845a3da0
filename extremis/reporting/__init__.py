"""`extremis report`: makes one HTML page about runs from their files in storage."""
