"""`extremis run auto`: the data is looked at, recipes are tried on a part of it, and the best one trains."""

WAITS = "refresh.stale=wait"  # for each table of negatives: what is trained on does not depend on the clock
