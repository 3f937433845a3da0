"""Encoders: text, as token ids, or sparse features to x in R^D."""
