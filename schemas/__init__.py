"""Stored data: Arrow schemas, manifests, layout of paths, atomic publishing."""

import functools

PAD = -1  # fills places without a label in arrays of label ids
LABEL_TEXTS = "labels"  # name of the source of label texts, also in a mix of sources
DISTRIBUTION = "extremis-xc"  # `extremis` on PyPI is another project


@functools.cache
def code_version() -> str:
    """Return the version of Extremis, from the installation or the checkout; `unknown` if neither has a version."""
    import configparser  # here, and not above, because every process loads this file
    import importlib.metadata
    from pathlib import Path

    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        setup = configparser.ConfigParser()
        setup.read(Path(__file__).parents[1] / "setup.cfg")
        named = setup.get("metadata", "name", fallback="") == DISTRIBUTION
        return setup.get("metadata", "version", fallback="unknown") if named else "unknown"
