"""Stored data: Arrow schemas, manifests, layout of paths, atomic publishing."""

PAD = -1  # fills places without a label in arrays of label ids
LABEL_TEXTS = "labels"  # name of the source of label texts, also in a mix of sources
