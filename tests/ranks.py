"""One function on several ranks of this machine: processes joined as under torchrun."""

import contextlib
import os
import random
import socket
import subprocess
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import Any

from tests.command import ROOT, environment
from tests.processes import FORKED
from trainer.group import Group, RankLostError


def on_ranks(ranks: int, action: Callable[..., Any], *arguments: Any, killed: Collection[int] = ()) -> list[Any]:
    """Run `action(group, *arguments)`, a module's function, on each rank; return their results in rank order.

    The result of a rank in `killed` is None. Raises AssertionError with the trace of any other rank that failed.
    """
    port = free_port()
    pipes, processes = [], []
    for rank in range(ranks):
        parent_end, child_end = FORKED.Pipe()
        # Daemons end with this process.
        process = FORKED.Process(target=_work, args=(child_end, rank, ranks, port, action, arguments), daemon=True)
        process.start()
        child_end.close()
        pipes.append(parent_end)
        processes.append(process)
    answers = [_received(pipe) for pipe in pipes]
    for process in processes:
        process.join()
    traces = {rank: answer for rank, (returned, answer) in enumerate(answers) if not returned}
    failed = [f"rank {rank}: {trace}" for rank, trace in traces.items() if rank not in killed]
    assert not failed, "\n".join(failed)
    return [answer if returned else None for returned, answer in answers]


def launch(ranks: int, *command: str, **popen: Any) -> list[subprocess.Popen[str]]:
    """Start `command` as `ranks` processes that know of each other, as any launcher would."""
    rendezvous = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment({**rendezvous, "RANK": str(rank)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **popen,
        )
        for rank in range(ranks)
    ]


def free_port() -> int:
    """Return a port that nothing listens on, below those that connections get: one of them could take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


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
