"""Surroundings that lack something: a command does without it, or says in one message what it lacks."""

import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from schemas.errors import InputError, RoomError, recognise
from tests.command import ROOT, Done, call, command, environment, refused
from tests.hostile.loop import arguments, files

MOUNT = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o ro tmpfs /dev/shm && exec "$@"', "sh"]


@pytest.mark.slow
def test_a_training_goes_on_without_streams_and_shared_memory(
    loop: tuple[Path, Any],
    tmp_path: Path,
    full: Path,
) -> None:
    """Its log is on a full disk, its other streams are closed, and nothing can be written in /dev/shm."""
    there = subprocess.run([*MOUNT, "true"], capture_output=True, check=False).returncode == 0
    words = command(*arguments("train", str(loop[0]), str(tmp_path)))
    shell = ["sh", "-c", f'exec "$@" <&- >&- 2>{full}', "sh", *(MOUNT if there else []), *words]
    assert subprocess.run(shell, cwd=ROOT, env=environment(), check=False).returncode == 0
    made, expected = (files(folder / "run" / "checkpoints") for folder in (tmp_path, loop[0]))
    assert made
    assert {name: content for name, content in made.items() if name.endswith(".safetensors")} == {
        name: content for name, content in expected.items() if name.endswith(".safetensors")
    }
    if not there:
        pytest.skip("no mount can be made here: /dev/shm was as it is")


def test_standard_input_that_is_closed_is_told(loop: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    refused(call("predict", loop[0] / "export", "-", "-"), "standard input is closed")


def test_an_address_space_that_is_too_small_is_want_of_memory(loop: tuple[Path, Any]) -> None:
    words = command("predict", loop[0] / "export", loop[0] / "texts.jsonl", "-")
    shell = ["bash", "-c", 'ulimit -v 350000; exec "$@"', "bash", *words]
    done = subprocess.run(shell, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    refused(Done(done.returncode, done.stdout, done.stderr), "out of memory", status=6)


MUCH = 1 << 50
ALLOCATIONS: dict[str, Callable[[], object]] = {
    "Python": lambda: bytearray(MUCH),
    "NumPy": lambda: np.empty(MUCH, np.uint8),
    "Arrow": lambda: pa.allocate_buffer(MUCH),
    "torch": lambda: torch.empty(MUCH, dtype=torch.uint8),
    "mmap": lambda: mmap.mmap(-1, MUCH),
    "what failed because of it": lambda: wrapped(from_none=False),
}


def wrapped(from_none: bool) -> None:
    try:
        bytearray(MUCH)
    except MemoryError as error:
        raise InputError("the file is no table") from (None if from_none else error)


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_every_library_s_want_of_memory_is_known(name: str) -> None:
    with pytest.raises(Exception) as failure:
        ALLOCATIONS[name]()
    known = recognise(failure.value)
    assert isinstance(known, RoomError), failure.value
    assert str(known).startswith("out of memory")


def test_a_thread_that_has_no_room_is_want_of_memory() -> None:
    code = (
        "import resource, threading; from schemas.errors import recognise\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))\n"
        "try: threading.Thread(target=int).start()\n"
        "except RuntimeError as error: print(recognise(error))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("out of memory"), done.stderr


def test_another_failure_is_not_want_of_memory() -> None:
    with pytest.raises(InputError) as failure:
        wrapped(from_none=True)
    assert recognise(failure.value) is failure.value
    assert recognise(ValueError("/dev/shm/run: no table")) is None
    assert recognise(RuntimeError("out of resource: shared memory, Required: 294912")) is None  # of a GPU
    for words in (
        "unable to allocate shared memory(shm) for file </torch_1>",
        "Error while creating shared memory segment",
    ):
        assert "--shm-size" in str(recognise(RuntimeError(words)))
