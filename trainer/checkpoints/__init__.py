"""Checkpoints: written by rank in the background, read by label range."""
