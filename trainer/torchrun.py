"""`python -m trainer.torchrun`: torchrun, but it ends with the status of the ranks instead of always with 1."""

import os
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from trainer.group import AGENT

if __name__ == "__main__":
    os.environ[AGENT] = str(os.getpid())
    try:
        main()
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        sys.exit(status if status > 0 else 128 - status)  # as a shell says which signal ended a process
    except SignalException as error:
        sys.exit(128 + error.sigval)
