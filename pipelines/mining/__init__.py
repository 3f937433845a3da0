"""Hard-negative tables: blocks of vectors indexed, searched, merged and aligned."""
