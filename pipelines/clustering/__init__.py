"""Group queries into clusters of equal size, so that in-batch negatives are hard (NGAME)."""
