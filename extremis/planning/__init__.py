"""`extremis plan`: bytes, memory and time of a run before it is started."""
