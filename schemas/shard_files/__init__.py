"""Shard files: Parquet and WebDataset tars, read by byte ranges and cached on a local disk."""
