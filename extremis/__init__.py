"""The command line of the project, and what only it needs: planning, inspection, reports, comparisons."""
