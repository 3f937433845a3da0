"""Nearest-vector search in one block, exact or with a Faiss index, for mining, the trainer's index and serving."""
