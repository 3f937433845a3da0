"""Matrices of which a step touches a few rows: their optimizers, kernels, rounding and memory."""
