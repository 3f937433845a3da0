"""Tables made during training: their dumps, and their adoption."""
