"""Checkpoints: each rank writes its part in the background; readers read checkpoints by label range."""
