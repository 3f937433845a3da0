"""Evaluation of a model: search, metrics, propensities, intervals, deciles."""

SHORTLIST, QUERIES = 100, 10_000  # number of labels per query that a fusion ranks again; queries to fit on
