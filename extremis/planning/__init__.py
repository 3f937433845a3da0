"""`extremis plan`: estimates a run's bytes and memory before the run starts, and also time with a rehearsal."""
