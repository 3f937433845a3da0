"""Pipelines on real clusters of Flink and Spark, which these tests start on this machine: `make engines`."""
