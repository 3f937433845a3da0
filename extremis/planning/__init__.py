"""`extremis plan`: estimates a run's bytes and memory before the run starts."""
