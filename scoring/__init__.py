"""What is made of a trained run: fused scores, memory, linear ranker, calibration, exports, prediction."""

import trainer  # noqa: F401  chooses where compiled loops are kept, before numba loads

SHORTLIST, QUERIES = 100, 10_000  # labels of a query that a fusion ranks again; queries to fit on
