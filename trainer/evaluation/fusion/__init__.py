"""Scores of labels' texts beside those of a classifier, and both fused (NGAME, appendix C)."""

SHORTLIST, QUERIES = 100, 10_000  # labels of a query that are ranked again; queries to learn from
