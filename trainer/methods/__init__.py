"""Methods, one file each: keys, settings from the data, candidates, and tables."""
