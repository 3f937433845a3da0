"""`extremis inspect`: tables, runs and queries in storage, described as text."""
