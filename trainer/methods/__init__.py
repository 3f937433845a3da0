"""Methods, one file each: its keys, what it takes from the data, its candidates, and the tables that it asks for."""
