"""Several recipes on the same data, and what the papers compare."""
