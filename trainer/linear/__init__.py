"""A linear ranker of words: a sparse vector per label over words and pairs of words, found through a tree of labels."""
