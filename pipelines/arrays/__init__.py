"""Import vectors of any model from files into tables, which are then mined in the same way as the tables of a run."""
