"""Labels for texts, by an exported run."""
