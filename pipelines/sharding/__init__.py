"""Turn raw rows into shards: keys, tokens, shards, manifests."""
