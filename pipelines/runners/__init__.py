"""Runners of pipelines: in this process, in several processes, on Dask and on clusters."""
