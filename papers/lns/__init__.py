"""LNS: see README.md."""
