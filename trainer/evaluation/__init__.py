"""How good a model is: search, metrics, propensities, intervals, deciles."""
