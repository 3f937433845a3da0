"""Versions: a data set that holds what is new, and names the rest (docs/decisions/0023)."""
