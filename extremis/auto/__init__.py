"""`extremis run auto`: the data is looked at, recipes are tried on a part of it, and the best one trains."""
