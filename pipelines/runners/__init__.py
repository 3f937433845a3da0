"""Runners of pipelines: in this process, in several processes, on Dask, on clusters."""
