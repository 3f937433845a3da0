"""A linear ranker: one sparse vector per label, over words and pairs of words."""
