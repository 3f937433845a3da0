"""Ranks of a command: the ranks' group, the claim on a RUN, and the command lines that created the run."""

import contextlib
import sys
from collections.abc import Iterator

from extremis.console import current_output, say
from schemas import storage
from schemas.errors import ExtremisError
from schemas.json_files import read_json, write_json
from schemas.layout import RunLayout
from schemas.owners.claim import Claim, Unclaimed, claimed
from schemas.owners.outputs import require_output_folder
from schemas.secrets import redact
from trainer.group import Group


@contextlib.contextmanager
def joined_ranks() -> Iterator[Group]:
    """Join this process's group until the block ends. The first rank that fails raises its error; other ranks exit.

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
def claimed_by_first_rank(run: str, group: Group, data: str) -> Iterator[Claim]:
    """Let rank 0 hold the claim on RUN for all ranks until the block ends. Raises InputError on every rank."""
    with contextlib.ExitStack() as held:
        claim: Claim = Unclaimed()
        refused: ExtremisError | None = None
        if group.first:
            try:
                require_output_folder(run, "trained", [data])
                claim = held.enter_context(claimed(run, "trained", say))
            except ExtremisError as error:
                refused = error
        refused = group.broadcast(refused)
        if refused is not None:
            raise refused
        yield claim


def record_command(run: RunLayout) -> None:
    """Append the current command line, if any, to the command lines of RUN. Raises TableError, StorageError."""
    if line := redact(current_output().command):
        write_json(run.commands, {"commands": [*read_commands(run), line]}, indent=1)


def read_commands(run: RunLayout) -> list[str]:
    """Return the command lines that created RUN, oldest first. Raises TableError if the file is damaged."""
    return list(read_json(run.commands)["commands"]) if storage.exists(run.commands) else []
