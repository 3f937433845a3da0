"""A folder per paper: what is here of it, its recipes, the command that makes its tables, and measured figures."""
