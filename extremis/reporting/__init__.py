"""`extremis report`: writes one HTML page about runs, based on their files in storage."""
