"""Files of rows: Parquet and WebDataset tars, read by byte ranges, kept in a local cache."""
