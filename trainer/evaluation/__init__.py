"""Evaluation of a model: search, metrics, propensities, intervals, deciles."""

SHORTLIST, QUERIES = 100, 10_000  # labels of a query that a fusion ranks again; queries to fit on
