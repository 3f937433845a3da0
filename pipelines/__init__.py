"""Beam pipelines that make tables, and the pure functions that they call."""

import logging

# Importing Beam warns that a BigQuery client is missing, which nothing here uses.
logging.getLogger().addFilter(lambda record: "apitools not found" not in record.getMessage())
