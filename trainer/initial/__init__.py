"""Initial values of a model that come from another run."""
