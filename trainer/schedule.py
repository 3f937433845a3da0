"""The learning rate's course: linear warm-up, then cosine decay (ASTRA, section 5)."""

import math


def rate_factor(step: int, steps: int, warmup: float, final: float) -> float:
    """The share of the full rate at global `step` in [0, steps): rises over `warmup` of the steps, falls to `final`."""
    rising = max(1.0, warmup * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    progress = (step - rising) / max(1.0, steps - rising)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
