"""MIPS-s: see README.md."""
