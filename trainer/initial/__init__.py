"""Initial values of a model: from another run, or from the texts of its labels."""
