"""Runners of pipelines: in process, in several processes, on Dask, on clusters."""
