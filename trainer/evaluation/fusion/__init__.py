"""Scores of labels' texts beside those of a classifier, and both fused (NGAME, appendix C)."""
