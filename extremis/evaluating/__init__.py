"""Scores of a run's checkpoint on a split of its data."""
