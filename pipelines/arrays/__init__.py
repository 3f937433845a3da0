"""Mining of vectors in files, of any model: they become tables, which are mined as those of a run are."""
