"""Turn raw rows into shards: hash keys, tokenize texts, write shards and manifests."""
