"""The ranks that torchrun launched: joined before anything is done; only one of them reports an error."""

import contextlib
import sys
from collections.abc import Iterator

from extremis.console import say
from schemas.errors import ExtremisError
from schemas.owners.claim import Claim, Unclaimed, claimed
from schemas.owners.place import require_place
from trainer.group import Group


@contextlib.contextmanager
def joined() -> Iterator[Group]:
    """Join this process's group for the block. The first rank that fails raises its error; the others exit.

    Raises ExtremisError, SystemExit.
    """
    group = Group.of_environment()
    try:
        yield group
        group.barrier()
    except ExtremisError as error:
        if not group.first_to_report():
            sys.exit(error.exit_status)
        raise
    except BaseException:
        group.first_to_report()
        raise
    group.close()


@contextlib.contextmanager
def owning(run: str, group: Group, data: str) -> Iterator[Claim]:
    """Let rank 0 hold the claim on RUN for all ranks while the block lasts. Raises InputError on every rank."""
    with contextlib.ExitStack() as held:
        claim: Claim = Unclaimed()
        refused: ExtremisError | None = None
        if group.first:
            try:
                require_place(run, "trained", [data])
                claim = held.enter_context(claimed(run, "trained", say))
            except ExtremisError as error:
                refused = error
        refused = group.broadcast(refused)
        if refused is not None:
            raise refused
        yield claim
