"""Code shared by several pipelines: dumps, vectors from tables, progress."""
