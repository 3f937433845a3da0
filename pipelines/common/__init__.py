"""Code shared by several pipelines: dumps, flows, exchange of bulk data, vectors from tables, progress, summaries."""
