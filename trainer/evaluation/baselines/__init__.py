"""Baselines without training, which a model should be above."""
