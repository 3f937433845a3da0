"""Mined tables as texts for anyone's trainer: triplets, tuples, labelled pairs, lists."""
