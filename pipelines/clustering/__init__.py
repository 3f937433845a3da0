"""Queries in clusters of equal size, whose in-batch negatives are hard (NGAME)."""
