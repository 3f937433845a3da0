"""Sections in the order of what a cut run should leave; each is a function of a module that lists its measurements."""

# A module is loaded by the process that measures: what it lacks is a gap of its section alone.
SECTIONS = {
    "versions": "versions:measurements",
    "kernels": "kernels:measurements",
    "losses": "same_losses:measurements",
    "steps": "classifier_step:measurements",
    "profile": "one_step:measurements",
    "waiting": "waiting:measurements",
    "bag": "whole_step:of_bag",
    "transformer": "whole_step:of_transformers",
    "checkpoint": "checkpointing:measurements",
    "search": "exact_search:measurements",
    "full": "one_vs_all:measurements",
    "tate": "tate:measurements",
}
