"""Views of a table on files that lie in other tables."""
