"""Tables made beside the training: the dumps they are made from, and how they are adopted."""
