"""`extremis inspect`: describes tables, runs and queries in storage as text."""
