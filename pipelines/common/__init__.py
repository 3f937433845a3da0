"""Parts that several pipelines share: dumps, flows, exchange of bulk data, vectors of tables, progress, summaries."""
