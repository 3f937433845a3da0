"""Matrices of which a step changes a few rows: their optimizers, kernels, rounding and memory."""
