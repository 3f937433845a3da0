"""`extremis plan`: bytes and memory of a run before it is started, and time where it is rehearsed."""
