"""Stored data: Arrow schemas, manifests, layout of paths, atomic publishing."""

VERSION = "0.1.0"  # of this code; setup.cfg reads it here
PAD = -1  # fills places without a label in arrays of label ids
LABEL_TEXTS = "labels"  # name of the source of label texts, also in a mix of sources


def code_version() -> str:
    """Return the version of Extremis."""
    return VERSION
