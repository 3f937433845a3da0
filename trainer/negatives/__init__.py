"""Negatives that depend on the present model: hash tables over classifier vectors (LNS), or an index."""
