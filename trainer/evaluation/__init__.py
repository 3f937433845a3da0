"""Evaluation of a model: search, metrics, propensities, intervals, deciles."""

SHORTLIST, QUERIES = 100, 10_000  # of a fusion: labels of a query that are ranked again; queries to learn from
