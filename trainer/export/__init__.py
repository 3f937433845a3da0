"""A trained run as files that serve: encoder, vectors, labels, thresholds, an index, and one manifest."""
