"""Runners of pipelines: in this process, in several processes and on clusters."""
