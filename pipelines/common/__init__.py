"""Parts that several pipelines share: claims, exchange of bulk data, aligned tables, progress."""
