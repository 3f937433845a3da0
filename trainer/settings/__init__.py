"""Settings that come from the data: options that a recipe leaves to it, as "auto"."""
