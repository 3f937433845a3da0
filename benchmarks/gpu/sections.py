"""Sections, most important first in case a run is cut short; each names a function that lists its measurements."""

# The measuring process loads a module, so that a missing package is a gap of only its section.
SECTIONS = {
    "versions": "versions:measurements",
    "kernels": "kernels:measurements",
    "losses": "same_losses:measurements",
    "steps": "classifier_step:measurements",
    "profile": "step_profiles:measurements",
    "waiting": "waiting:measurements",
    "bag": "whole_step:of_bag",
    "transformer": "whole_step:of_transformers",
    "checkpoint": "checkpointing:measurements",
    "search": "exact_search:measurements",
    "full": "one_vs_all:measurements",
    "tate": "tate:measurements",
}
