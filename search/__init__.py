"""Nearest vectors of one block, exact or by a Faiss index; shared by mining, the trainer's own index and serving."""
