"""Heads, which turn embeddings of queries into a loss: a classifier, or an encoder of labels."""
