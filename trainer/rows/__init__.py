"""Matrices in which each step changes only a few rows: optimizers, kernels, rounding and memory."""
