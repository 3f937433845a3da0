"""Negatives that depend on the model as it is at the step: hash tables over classifier vectors (LNS), or an index."""
