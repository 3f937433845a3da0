"""`extremis report`: one page about runs, gathered from what they left in storage, drawn, and written as one file."""
