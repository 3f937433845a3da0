"""Records of a run while it trains: metrics.jsonl, and watchers that receive its numbers."""
