"""The ranks that torchrun launched: joined before anything is done; only one of them reports an error."""

import contextlib
import sys
from collections.abc import Iterator

from schemas.errors import ExtremisError
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
        if not group.tells():
            sys.exit(error.exit_status)
        raise
    except BaseException:
        group.tells()
        raise
    group.close()
