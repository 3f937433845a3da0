"""Encoders: map texts (token ids) or sparse features to x in R^D."""
