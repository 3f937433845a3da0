"""Automatic settings: options that are "auto" in a recipe and are chosen from the data."""
