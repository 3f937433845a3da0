"""ASTRA: see README.md."""
