"""`extremis status`: who is at work, how far, and what it waits for, of runs and data sets in every state."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import extremis
from extremis.at_work import outermost
from extremis.console import show_spinner
from schemas import owners, storage
from schemas.errors import InputError
from schemas.manifest import Manifest, publish
from schemas.owners import LEASE_SECONDS, Claim, Owner, claimed, watched
from schemas.states import showing
from schemas.waits import Wait
from tests.command import ROOT
from trainer.recipe_files import dump_config, load_recipe


@pytest.fixture(autouse=True)
def beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "BEAT_SECONDS", 0.01)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose second epoch has begun, with a checkpoint and a table."""
    run = tmp_path / "runs" / "1"
    storage.write_bytes(str(run / "config.toml"), dump_config(load_recipe("astra", ["train.epochs=4"])))
    publish(str(run / "checkpoints" / "step-00000012"), Manifest(kind="checkpoint"))
    publish(str(run / "negatives" / "epoch-0001" / "queries"), Manifest(kind="negatives"))
    for epoch in range(2):
        storage.write_bytes(str(run / "adoptions" / f"epoch-000{epoch}.json"), b"{}")
    return run


def look(place: Path) -> dict[str, Any]:
    """The facts of the one output at or below `place`."""
    (output,) = extremis.status(place).outputs
    return json.loads(json.dumps(output))


def shown(place: Path) -> str:
    return str(extremis.status(place))


def seen(place: Path, **facts: object) -> dict[str, Any]:
    """Wait for the first heartbeat of the one process at `place` with these facts; return the process."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        processes = look(place)["processes"]
        if processes and processes[0]["facts"].items() >= facts.items():
            return processes[0]
        time.sleep(0.02)
    raise AssertionError(processes)


def test_a_run_that_nobody_trains_is_stopped_and_then_finished(run: Path) -> None:
    told = look(run)
    assert (told["kind"], told["state"], told["processes"]) == ("run", "stopped", [])
    assert told["progress"] == "2 of 4 epochs begun, checkpoint at step 12, tables: 1"
    files = {path: path.stat().st_size for path in run.rglob("*") if path.is_file()}
    assert sum(told["bytes"].values()) == sum(files.values())
    assert told["bytes"]["negatives"] == sum(size for path, size in files.items() if "negatives" in path.parts)
    storage.write_bytes(str(run / "finished.json"), b'{"step": 24, "epochs": 4}')
    assert look(run)["state"] == "finished"


def test_a_trainer_at_work_and_one_that_waits(run: Path) -> None:
    facts = {"step": 13, "steps_total": 24, "loss": 0.5}
    more = {**facts, "train_drop": float("inf"), "train_loss": float("nan")}  # JSON has no such numbers
    with show_spinner("train: at work"), claimed(str(run), "trained"), showing(more.copy):
        process = seen(run, **facts)
        told = look(run)
        assert (process["facts"], process["waits_for"]) == (facts, None)
        assert told["state"] == process["state"] == "at work"
        assert told["progress"].startswith("2 of 4 epochs begun, step 13 of 24, loss 0.500, checkpoint")
        with Wait("the table of epoch 2") as wait:
            wait._since -= 65
            while look(run)["state"] != "waiting":
                time.sleep(0.02)
            process = look(run)["processes"][0]
            assert process["waits_for"] == "the table of epoch 2"
            assert 65 <= process["waited"] < 75
            assert "waits for the table of epoch 2, 1:0" in shown(run)
    assert look(run)["state"] == "stopped"


@pytest.mark.parametrize(("age", "state"), [(1, "at work"), (LEASE_SECONDS + 30, "silent")])
def test_a_trainer_elsewhere_is_silent_after_a_lease(run: Path, age: float, state: str) -> None:
    owner = replace(Owner.here("trained"), host="far", machine="elsewhere")
    storage.write_sealed(str(run / owners.CLAIM_FILE), json.dumps(asdict(owner)).encode())
    assert look(run)["state"] == "starting"
    Claim(str(run), owner)._write_beat()
    (beat,) = run.glob(".claim-beat-*")
    body = json.loads(storage.read_sealed(str(beat)))
    storage.write_sealed(str(beat), json.dumps({**body, "at": body["at"] - age}).encode())
    told = look(run)
    assert told["state"] == state
    assert age <= told["processes"][0]["heartbeat_age"] < age + 10
    assert f"trained by {owner.pid} on far" in shown(run)


def test_a_killed_trainer_and_the_miner_that_waits_on(run: Path) -> None:
    """On this machine a killed process is known at once."""
    kill = f"from schemas.owners import claimed\nwith claimed({str(run)!r}, 'trained'): os.kill(os.getpid(), 9)"
    works = f"import os\n{kill}"
    subprocess.run([sys.executable, "-c", works], cwd=ROOT, check=False)
    assert look(run)["state"] == "dead"
    with watched(str(run), "mined"), Wait("the next dump") as wait, showing({"tables": 1, "epoch": 3}.copy):
        wait._since -= 20
        while len(processes := look(run)["processes"]) < 2:
            time.sleep(0.02)
        assert [(each["doing"], each["state"], each["owns"]) for each in processes] == [
            ("trained", "dead", True),
            ("mined", "waiting", False),
        ]
        table = str(run / "negatives" / "epoch-0003")
        with claimed(table, "mined"):  # the same process, at work on a table
            while look(run)["processes"][1]["at"] != table:
                time.sleep(0.02)
        assert look(run)["state"] == "dead"
    assert [each["doing"] for each in look(run)["processes"]] == ["trained"]


def test_a_folder_of_runs_and_data_sets(run: Path, tmp_path: Path) -> None:
    """A table inside a run is a part of it; one outcome that cannot be read hides no other."""
    publish(str(tmp_path / "data"), Manifest(kind="data", parameters={"rows": {"train": 5}}))
    storage.write_bytes(str(tmp_path / "runs" / "2" / "config.toml"), b"spoilt")
    with claimed(str(tmp_path / "new"), "sharded"), showing({"stage": "read", "rows": 5, "rows_total": 10}.copy):
        seen(tmp_path / "new", stage="read")
        told = {each["place"]: each for each in extremis.status(tmp_path).outputs}
    names = {Path(place).relative_to(tmp_path).as_posix(): each for place, each in told.items()}
    assert {name: (each["kind"], each["state"]) for name, each in names.items()} == {
        "data": ("data", "finished"),
        "new": ("unfinished", "at work"),
        "runs/1": ("run", "stopped"),
        "runs/2": ("damaged", "stopped"),
    }
    assert names["data"]["rows"] == {"train": 5}
    assert names["new"]["progress"] == "read: 5 of 10 rows"
    assert "damaged, or changed by hand" in names["runs/2"]["progress"]
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="no run, data set or other table here"):
        extremis.status(tmp_path / "other")


@given(
    st.sets(
        st.lists(st.sampled_from(["a", "b", "a-", "a.b"]), max_size=3).map(lambda each: "".join(f"{n}/" for n in each))
    )
)
def test_every_folder_is_in_one_of_the_outermost(folders: set[str]) -> None:
    roots = outermost(folders)
    assert {*roots} <= folders
    assert all(sum(folder.startswith(root) for root in roots) == 1 for folder in folders)
