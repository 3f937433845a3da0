"""Raw rows to shards: keys, tokens, shards, manifests."""
