"""Versions: a version is a data set that contains new rows and refers to the earlier rows (docs/decisions/0023)."""
