"""Mining of vectors in files, from any model: they become tables, which are mined like those of a run."""
