"""Pipelines that build tables, and the pure functions that the pipelines call."""

import logging

# Importing Beam warns that a BigQuery client is missing, but nothing here uses BigQuery.
logging.getLogger().addFilter(lambda record: "apitools not found" not in record.getMessage())
