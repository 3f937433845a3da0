"""A rehearsal of a planned run: the work of one rank and one worker, measured on this machine."""
