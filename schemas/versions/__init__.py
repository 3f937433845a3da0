"""Versions of data: what a manifest says of them."""
