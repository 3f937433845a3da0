"""Sizes that headers state: numbers of labels and features that are too large to believe are refused."""

from pipelines.formats.base import LABELS, Part
from schemas.errors import InputError

MAX_FEATURES = 1 << 31  # an id is an int32
MAX_LABELS = 1 << 31
_LABELS_A_POINT = 1000


def check_features(features: int, url: str) -> None:
    """Raise InputError where the header of `url` states more features than there can be."""
    if features > MAX_FEATURES:
        raise InputError(f"{url}: the header states {features:,} features; there can be {MAX_FEATURES:,}. Fix it.")


def labels_by_number(labels: int, points: int, url: str) -> Part:
    """Make the part of `labels` labels of which the header of `url` states nothing but their number.

    Raises InputError where there cannot be so many: they would all be written.
    """
    limit = min(MAX_LABELS, _LABELS_A_POINT * (points + _LABELS_A_POINT))
    if labels > limit:
        raise InputError(
            f"{url}: the header states {labels:,} labels for {points:,} points; at most {limit:,} are believed without "
            "a file of the labels. Fix the header."
        )
    return Part(LABELS, "labels", {}, rows=labels)
