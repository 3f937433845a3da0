"""Training with a miner beside it, and its metrics while it runs."""
