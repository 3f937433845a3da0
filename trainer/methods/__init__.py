"""Training methods, one file per method: its keys, automatic settings, candidates and tables."""
