"""Data on storage: Arrow schemas, manifests, layout of paths, atomic publishing."""
