"""Matrices of which each step changes a few rows: their optimizers, kernels, rounding and memory."""
