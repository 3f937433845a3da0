"""DEXML: see README.md."""
