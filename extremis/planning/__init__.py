"""`extremis plan`: bytes and memory of a run before it starts, and time if it is rehearsed."""
