"""Export of a trained run for serving: encoder, vectors, labels, thresholds, an index, and one manifest."""
