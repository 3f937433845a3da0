"""One folder per paper: implemented parts, recipes, the command that makes its tables, and measured figures."""
