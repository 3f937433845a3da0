"""Checkpoints: each rank writes its part in the background; readers read them by label range."""
