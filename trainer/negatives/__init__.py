"""Negatives that depend on the current model, from hash tables over classifier vectors (LNS) or an index."""
