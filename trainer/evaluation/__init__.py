"""Evaluation of a model: search, metrics, propensities, intervals."""
