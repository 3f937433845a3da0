"""`extremis run auto`: surveys the data, tries recipes on part of the data, and trains the best recipe."""

WAIT_FOR_TABLES = (
    "refresh.stale=wait"  # wait for each table of negatives, so that the training data does not depend on timing
)
