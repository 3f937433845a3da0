"""Settings that come from the data: the options that are "auto" in a recipe."""
