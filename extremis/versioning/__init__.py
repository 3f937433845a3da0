"""Versions of data under a prefix: what there is, who needs whom, and removing one."""
