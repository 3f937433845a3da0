"""Import vectors of any model from files as tables, which are then mined like the tables of a run."""
