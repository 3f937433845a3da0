"""Several ranks on this machine: each a process of its own, joined as under torchrun, running one function."""

import contextlib
import multiprocessing
import os
import socket
import subprocess
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import Any

from tests.command import ROOT, environment
from trainer.group import Group, RankLostError

_context = multiprocessing.get_context("forkserver")
# Imported once; the ranks are forked from a process that has imported and computed nothing.
_context.set_forkserver_preload(["trainer.loop", "trainer.evaluation.evaluate", "tests.ranks"])


def on_ranks(ranks: int, action: Callable[..., Any], *arguments: Any, killed: Collection[int] = ()) -> list[Any]:
    """`action(group, *arguments)`, a module's function, on each of `ranks` ranks: what they return, in rank order.

    Of those that are `killed` None. Raises AssertionError with the trace of every other rank that did not return.
    """
    port = free_port()
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = _context.Pipe()
        # Daemons end with this process.
        process = _context.Process(target=_work, args=(theirs, rank, ranks, port, action, arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    found = [_received(pipe) for pipe in pipes]
    for process in processes:
        process.join()
    failed = [f"rank {rank}: {what}" for rank, (well, what) in enumerate(found) if not well and rank not in killed]
    assert not failed, "\n".join(failed)
    return [what if well else None for well, what in found]


def launch(ranks: int, *command: str, **popen: Any) -> list[subprocess.Popen[str]]:
    """`command` as `ranks` processes that know of each other, as any launcher would start them."""
    here = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment({**here, "RANK": str(rank)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **popen,
        )
        for rank in range(ranks)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _received(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return False, "it was killed"


def _work(pipe: Connection, rank: int, ranks: int, port: int, action: Callable[..., Any], arguments: Any) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        group = Group.of_environment()
        answer = (True, action(group, *arguments))
        with contextlib.suppress(RankLostError):
            group.barrier()
        group.close()
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
