"""Data on storage: Arrow schemas, manifests, layout of paths, atomic publishing."""

PAD = -1  # in place of a label that is not there, in arrays of labels
LABEL_TEXTS = "labels"  # the source of label texts; in a mix, too
