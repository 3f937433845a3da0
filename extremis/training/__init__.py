"""Training with a miner beside it, and what is seen of it while it goes."""
