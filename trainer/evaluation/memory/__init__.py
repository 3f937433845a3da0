"""Memory of the training points: the nearest of a query vote with their labels."""
