"""Records of a run while it trains: metrics.jsonl, and watchers that its numbers are sent to."""
