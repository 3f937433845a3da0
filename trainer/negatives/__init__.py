"""Negatives of a batch: random draws, sources that need the current model (an index, hash tables), and their merge."""
