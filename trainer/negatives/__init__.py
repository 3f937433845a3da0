"""Negatives that depend on the present model, from hash tables over classifier vectors (LNS) or an index."""
