"""Nearest vectors of one block, exact or by a Faiss index: what mining, the trainer's own index and serving share."""
