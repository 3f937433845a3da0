"""Where pipelines run: in process, in several processes, on Dask, on clusters."""
