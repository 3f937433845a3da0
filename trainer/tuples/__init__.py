"""Export of mined tables as texts for any trainer: triplets, tuples, labelled pairs, lists."""
