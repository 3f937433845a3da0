"""Training: streams and joins of tables, encoders, classifier, losses, loop, refresh, checkpoints, evaluation.

Legend of shapes: B batch, T tokens, D dimension, P positives, H hard, R random, C candidates, K table width, L labels,
N queries, G ranks, S canonical streams.
"""

from trainer.compile_cache import choose_compile_cache

choose_compile_cache()  # before the first import of numba
