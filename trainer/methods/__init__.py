"""Methods, one file per method: keys, settings from the data, candidates, and tables."""
