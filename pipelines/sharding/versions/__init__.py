"""Versions: a data set that contains new rows, and refers to the rest (docs/decisions/0023)."""
