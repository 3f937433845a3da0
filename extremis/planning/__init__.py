"""`extremis plan`: bytes and memory of a run before it starts, and its time after a rehearsal."""
