"""What is made of a trained run: fused scores, memory, linear ranker, calibration, exports, prediction."""

SHORTLIST, QUERIES = 100, 10_000  # labels of a query that a fusion ranks again; queries to fit on
