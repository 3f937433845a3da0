"""Nearest-vector search in one block, exact or with a Faiss index, for mining, the trainer's index and serving."""

NOT_A_NUMBER = (
    "a score is not a number, because the queries or the vectors contain NaN or infinity. Training has diverged: go "
    "back to an earlier checkpoint, or lower the learning rate."
)
