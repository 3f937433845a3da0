"""Heads, which turn embeddings of queries into a loss: a classifier, or a label encoder."""
