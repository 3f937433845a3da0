"""Messages between ranks, over real processes; one rank alone is the identity of all of it."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainer.group
from schemas.errors import InputError, PeerError
from schemas.layout import DataLayout
from tests.builders import build_data
from tests.command import ROOT, environment
from tests.ranks import on_ranks
from trainer.group import ALONE, Group, RankLostError, join, label_range
from trainer.loop import Trainer
from trainer.model import DataSizes
from trainer.recipe_files import validate
from trainer.setup import require_consistent_ranks
from trainer.stream import Ranks


@given(labels=st.integers(0, 10**9), ranks=st.integers(1, 64))
def test_label_ranges_are_contiguous_and_equal_to_within_one(labels: int, ranks: int) -> None:
    ranges = [label_range(labels, rank, ranks) for rank in range(ranks)]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == labels
    assert {stop - start for start, stop in ranges} <= {labels // ranks, labels // ranks + 1}


def arrays_of(rank: int) -> list[np.ndarray]:
    draw = np.random.default_rng(rank)
    rows = 3 * rank % 4  # some of them none
    return [
        draw.integers(0, 9, rows),
        draw.random((rank, 2)).astype(np.float32),
        draw.integers(0, 9, (2, 3), np.int32),
        np.zeros(rows, bool),
    ]


def sent(of: int, to: int) -> list[np.ndarray]:
    """Arrays that one rank sends another, of sizes that depend on both."""
    return [array[to:] + np.array(10 * of, array.dtype) for array in arrays_of(of + to)]


def take_turns(group: Group, turns: list[float]) -> None:
    turns += [group.sum(torch.tensor([float(n)])).item() for n in range(50)]


def everything(group: Group) -> dict[str, object]:
    """One call of each operation."""
    part = torch.full((group.rank, 2), float(group.rank))
    turns: list[float] = []
    thread = threading.Thread(target=take_turns, args=(group.for_another_thread(), turns))
    thread.start()
    sizes = list(range(group.ranks))
    mine = [group.max(torch.tensor([n * (1 + group.rank)])).item() for n in range(50)]
    thread.join()
    return {
        "sum": group.sum(torch.tensor([1.0, group.rank])).tolist(),
        "a view": group.sum(torch.arange(6).reshape(2, 3).T[1:]).tolist(),
        "gather": group.all_gather(part).tolist(),
        "nothing": group.all_gather(torch.empty(0, 3)).shape,
        "sizes": group.all_gather(torch.tensor([group.rank, 0]), [2] * group.ranks).tolist(),
        "arrays": [array.tolist() for array in group.all_gather_arrays(*arrays_of(group.rank))],
        "dtypes": [array.dtype for array in group.all_gather_arrays(*arrays_of(group.rank))],
        "exchanged": group.all_to_all([sent(group.rank, to) for to in range(group.ranks)]),
        "own sums": group.reduce_scatter(torch.ones(sum(sizes), 2) * (1 + group.rank), sizes).tolist(),
        "objects": group.all_gather_objects({"rank": group.rank}),
        "broadcast": group.broadcast(f"of {group.rank}"),
        "decide": group.decide(os.getpid),
        "before": group.before(10 + group.rank),
        "turns": turns,
        "mine": mine,
        "status of the first to end": group.first_to_report(40 + group.rank),
        "leaf": group.all_gather(torch.ones(1, requires_grad=True)).requires_grad,
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_hear_the_same(ranks: int) -> None:
    results = on_ranks(ranks, everything)
    laid = [np.concatenate(parts) for parts in zip(*map(arrays_of, range(ranks)), strict=True)]
    for rank, heard in enumerate(results):
        assert heard["sum"] == [ranks, sum(range(ranks))]
        assert heard["a view"] == [[ranks, 4 * ranks], [2 * ranks, 5 * ranks]]
        assert heard["gather"] == [[r, r] for r in range(ranks) for _ in range(r)]
        assert heard["nothing"] == (0, 3)
        assert heard["sizes"] == [value for r in range(ranks) for value in (r, 0)]
        assert heard["arrays"] == [array.tolist() for array in laid]
        assert heard["dtypes"] == [array.dtype for array in laid]
        for of, message in enumerate(heard["exchanged"]):
            for array, expected in zip(message, sent(of, rank), strict=True):
                np.testing.assert_array_equal(array, expected)
                assert array.dtype == expected.dtype
        assert heard["own sums"] == [[sum(range(1, ranks + 1))] * 2] * rank
        assert heard["objects"] == [{"rank": r} for r in range(ranks)]
        assert heard["broadcast"] == "of 0"
        assert heard["decide"] == results[0]["decide"]
        assert heard["before"] == sum(10 + r for r in range(rank))
        assert heard["turns"] == [n * ranks for n in range(50)]
        assert heard["mine"] == [n * ranks for n in range(50)]
        assert not heard["leaf"]
    statuses = [heard["status of the first to end"] for heard in results]
    assert sorted(statuses, key=str)[:-1] == [40 + statuses.index(None)] * (ranks - 1)


def test_one_rank_alone_is_the_identity() -> None:
    heard = everything(ALONE)
    assert heard["sum"] == [1, 0]
    assert heard["arrays"] == [array.tolist() for array in arrays_of(0)]
    assert (heard["objects"], heard["broadcast"], heard["before"]) == ([{"rank": 0}], "of 0", 0)
    assert (heard["decide"], heard["status of the first to end"]) == (os.getpid(), None)
    tensor = torch.ones(2)
    assert ALONE.sum(tensor) is tensor is ALONE.all_gather(tensor)


def lose_the_last(group: Group) -> tuple[int | None, str]:
    group.barrier()
    if group.rank == group.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLostError) as caught:
        group.sum(torch.ones(1000))
    return group.first_to_report(caught.value.exit_status), str(caught.value)


def test_a_killed_rank_is_noticed_and_one_of_the_others_tells() -> None:
    *others, killed = on_ranks(3, lose_the_last, killed={2})
    assert killed is None
    assert {status for status, _ in others} == {None, 3}
    for rank, (_, said) in enumerate(others):
        assert f"rank {rank} of 3 lost another rank" in said
        assert "Continue with resume=True" in said


@pytest.mark.parametrize("asked", [False, True])
def test_a_gpu_that_waits_for_a_rank_is_given_up_and_sooner_when_asked_to_stop(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No collective of a GPU returns when a peer is gone: it is asked whether it is done, and never read."""
    monkeypatch.setattr(trainer.group, "GPU_SECONDS", 0.2 if not asked else 60.0)
    monkeypatch.setattr(trainer.group, "_STOP_SECONDS", 0.1)
    group = trainer.group._Joined(Ranks(1, 2), None, "cpu:gloo,cuda:nccl", None)
    answers = iter([False, False, True])
    group._wait_until(lambda: next(answers), lambda: False)
    assert next(answers, None) is None
    with pytest.raises(RankLostError, match=r"rank 1 of 2: the GPU has waited .* for another rank.*resume=True"):
        group._wait_until(lambda: False, lambda: asked)


class Lost(Group):
    """A rank whose GPU waits for one that is gone."""

    def wait_for(self, tensor: torch.Tensor, is_stop_requested: Callable[[], bool] = lambda: False) -> None:
        assert not is_stop_requested()
        raise RankLostError(f"{len(tensor)} loss is not there")


def test_a_loss_is_waited_for_before_it_is_read(tmp_path: Path) -> None:
    data = build_data(str(tmp_path / "data")).layout
    recipe = validate({"encoder": {"dimension": 4, "buckets": 16}, "logging": {"tensorboard": False}}, "test")
    trainer = Trainer.start(data.root, str(tmp_path / "run"), recipe, lambda line: None, Lost())
    with pytest.raises(RankLostError, match="1 loss is not there"):
        next(trainer.train())


def refuse(group: Group, data: DataLayout) -> str:
    recipe, facts = validate({"encoder": {"dimension": 4, "buckets": 16}}, "test"), DataSizes.of(data)
    require_consistent_ranks(recipe, facts, group, torch.device("cuda", group.rank))
    with pytest.raises(InputError) as caught:
        require_consistent_ranks(recipe, facts, group, torch.device("cuda", group.rank % 2))
    return str(caught.value)


def test_two_ranks_on_one_gpu_are_refused(tmp_path: Path) -> None:
    data = build_data(str(tmp_path / "data")).layout
    said = on_ranks(3, refuse, data)
    assert said == [said[0]] * 3
    assert "ranks 0 and 2 of 3 are both on cuda:0 of" in said[0]
    assert "torchrun --nproc-per-node" in said[0]


def test_ranks_without_an_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=r"rank 1 of 2 cannot find the other ranks: .*MASTER_ADDR.*torchrun"):
        join(Ranks(1, 2))


def test_ranks_end_with_the_agent_that_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed agent stops no rank; without a launcher they would train on, and write."""
    join = "from trainer.group import Group; Group.of_environment().barrier()"
    program = f"import os, time; {join}; print(os.getpid(), flush=True); time.sleep(100)"
    launcher = [sys.executable, "-m", "trainer.torchrun", "--standalone", "--nproc-per-node=2", "--no-python"]
    command = [*launcher, sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as agent:
        ranks = [psutil.Process(int(agent.stdout.readline())) for _ in range(2)]
        agent.kill()
        gone, alive = psutil.wait_procs(ranks, timeout=10)
    assert (len(gone), alive) == (2, [])
    monkeypatch.setattr(trainer.group, "end_with_parent", lambda: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv(trainer.group.AGENT, str(agent.pid))
    with pytest.raises(PeerError, match="torchrun has ended"):
        Group.of_environment()
