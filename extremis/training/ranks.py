"""The ranks that torchrun launched: joined before anything is done, and of one voice when something fails."""

import contextlib
import sys
from collections.abc import Iterator

from schemas.errors import ExtremisError
from trainer.group import Group


@contextlib.contextmanager
def joined() -> Iterator[Group]:
    """This process's group for the block. Of an error that ends all ranks the first to have it tells; others exit.

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
