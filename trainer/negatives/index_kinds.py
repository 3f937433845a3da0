"""Indexes that only the trainer has, by their names in a recipe's `refresh.index`."""

FRESH = "fresh"  # none: every label is scored by its vector as it is
MOST_FRESH = 1 << 17  # labels of a rank up to which `auto` means that
MIPS = "mips"  # K = sqrt(L) clusters of spherical k-means, of which tau = 64 are searched (MIPS-s, sections 4 and 5.1)
