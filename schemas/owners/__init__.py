"""One owner for each output: a claim on it, and attempts that are built aside and put in place whole."""
