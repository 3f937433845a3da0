"""Small records: JSON objects with a checksum, and what a manifest has to follow besides its form."""
