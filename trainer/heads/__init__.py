"""Heads, which compute the loss from query embeddings: a classifier or a label encoder."""
