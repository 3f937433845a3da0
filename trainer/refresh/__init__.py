"""Dumps for tables that are made during training, and adoption of these tables."""
