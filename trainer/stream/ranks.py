"""Rank of this process, as `torchrun` sets it."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from schemas.errors import InputError


class Ranks(NamedTuple):
    """`rank` in [0, `ranks`)."""

    rank: int
    ranks: int


def ranks_of_environment(environment: Mapping[str, str] | None = None) -> Ranks:
    """Return RANK and WORLD_SIZE of the environment, as `torchrun` and other launchers set them; (0, 1) without them.

    Raises InputError for one without the other, and for impossible values.
    """
    variables = os.environ if environment is None else environment
    rank, ranks = variables.get("RANK"), variables.get("WORLD_SIZE")
    if rank is None and ranks is None:
        return Ranks(0, 1)
    try:
        position = Ranks(int(rank or ""), int(ranks or ""))
    except ValueError:
        position = Ranks(-1, 0)
    if not 0 <= position.rank < position.ranks:
        raise InputError(
            f"RANK = {rank!r}, WORLD_SIZE = {ranks!r} in the environment: expected both, with 0 <= RANK < WORLD_SIZE. "
            "Launch with torchrun, which sets them, or unset both."
        )
    return position
