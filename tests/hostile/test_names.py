"""Every command takes DATA, RUN and OUT for exactly the places named: its result is there, and no other changes."""

import fnmatch
import itertools
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.command import call, extremis
from tests.hostile.loop import COMMANDS, SHARD, TRAIN, UNSTABLE, files
from tests.places import ALL, NAMES, Store, decoys, in_bucket, in_memory, on_disk
from tests.s3 import Bucket, reached_through_proxy

BUCKET = "names"
MINED = "run/negatives/epoch-0002/queries"
# Like COMMANDS: arguments, what is made inside of a run, and what is made.
MORE: dict[str, tuple[tuple[str, ...], str, str]] = {
    "cluster": (
        ("cluster", "{root}/data", "{root}/run", "--queries", "{root}/vectors", "--size", "4", "--out", "{out}/groups"),
        "",
        "groups/",
    ),
    "merge": (
        ("merge", "{root}/data", f"{{root}}/{MINED}", "{out}/merged", "--others", f"{{local}}/{MINED}"),
        "",
        "merged/",
    ),
    "tuples": (("tuples", "{root}/run", "{out}/tuples", "--data", "{root}/data", "--keys"), "", "tuples/"),
    "report": (("report", "{root}/data", "{root}/run", "--queries", "0", "--out", "{out}/report.html"), "", "report"),
    "recipes": (("recipes", "copy", "astra", "{out}/astra.toml"), "", "astra.toml"),
    "inspect": (("inspect", "{root}/run", "--json"), "", ""),
    "list": (("data", "list", "{root}", "--json"), "", ""),
    "again": (("shard", "{root}/raw", "{root}/data", *SHARD, "--seed", "1", "--overwrite"), "", ""),
    "drop": (("data", "drop", "{root}/data"), "", ""),
}
ALL_COMMANDS = COMMANDS | MORE


class World:
    """A finished loop at the place `name` of a store, and other places that `name` could be taken for."""

    def __init__(self, store: Store, local: Path, name: str) -> None:
        self.store, self.local, self.loop = store, local, (loop := files(local))
        self.root, self.out = f"{store.root}/{name}", f"{store.root}/{name}-out"
        self._name = name
        others = decoys(name)
        matched = [other for other in others if fnmatch.fnmatchcase(other, name)]
        cut = [other for other in others if name.startswith(other)]
        marked = [path for path in loop if path.endswith("_manifest.json")]
        store.clear()
        for path, body in loop.items():
            store.put(f"{name}/{path}", body)
        for other, end, path in itertools.product({*matched[:1], *cut[:1]}, ("", "-out"), marked):
            store.put(f"{other}{end}/{path}", b"other")
        self._around = self._others(store.stamps())

    def _others(self, stamps: Mapping[str, object]) -> dict[str, object]:
        own = f"{self._name}/", f"{self._name}-out/"
        return {path: stamp for path, stamp in stamps.items() if not path.startswith(own)}

    def check(self, command: str, said: Any) -> None:
        """Run a command; its result is that of the undisturbed loop, and nothing else has changed."""
        words, of_run, made = ALL_COMMANDS[command]
        if of_run:  # it writes into a run, which has to be there
            for path, body in self.loop.items():
                if path.startswith("run/") and not path.startswith(f"run/{of_run}"):
                    self.store.put(f"{self._name}-out/{path}", body)
        done = call(*(word.format(root=self.root, out=self.out, local=self.local) for word in words))
        assert done.status == 0, done.err
        stored, start = self.store.stamps(), f"{self._name}-out/"
        assert self._others(stored) == self._around
        if command == "evaluate":
            assert done.json["metrics"] == said["metrics"]
        elif command == "list":
            assert [each["data"] for each in done.json["versions"]] == ["data"]
        elif command == "drop":
            assert not [path for path in stored if path.startswith(f"{self._name}/data/")]
        elif command in COMMANDS and command != "fuse":  # its manifest has seconds
            found = {path.removeprefix(start): body for path, body in self.store.files(f"{start}{made}").items()}
            expected = {path: body for path, body in self.loop.items() if path.startswith(made)}
            assert {path: body for path, body in found.items() if not path.endswith(UNSTABLE)} == expected
        else:
            assert not made or [path for path in stored if path.startswith(f"{start}{made}")]


@pytest.fixture(scope="module")
def far(server: tuple[str, int], bucket: Bucket) -> Iterator[Store]:
    """Yield a bucket of a server that speaks S3."""
    with reached_through_proxy(server):
        yield in_bucket(bucket)


def test_a_place_on_a_disk(loop: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    world = World(on_disk(tmp_path), loop[0], ALL)
    for command in ALL_COMMANDS:
        world.check(command, loop[1])


@pytest.mark.slow
def test_a_place_in_memory(loop: tuple[Path, dict[str, Any]]) -> None:
    world = World(in_memory(), loop[0], ALL)
    for command in ("shard", "mine", "evaluate", "again", "drop"):
        world.check(command, loop[1])


def test_a_place_in_a_bucket(loop: tuple[Path, dict[str, Any]], far: Store, request: pytest.FixtureRequest) -> None:
    world = World(far, loop[0], ALL)
    for command in ALL_COMMANDS if "versitygw" in request.node.name else ("mine", "predict"):
        world.check(command, loop[1])


def check_names(store: Store, loop: tuple[Path, dict[str, Any]]) -> None:
    """Run every command at places of drawn names."""

    @given(NAMES)
    @settings(max_examples=5, suppress_health_check=[*HealthCheck])
    def check(name: str) -> None:
        world = World(store, loop[0], name)
        for command in ALL_COMMANDS:
            world.check(command, loop[1])

    check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_places_of_any_name(loop: tuple[Path, dict[str, Any]], tmp_path: Path, kind: str) -> None:
    check_names(on_disk(tmp_path) if kind == "disk" else in_memory(), loop)


@pytest.mark.slow
def test_places_of_any_name_in_a_bucket(loop: tuple[Path, dict[str, Any]], far: Store) -> None:
    check_names(far, loop)


def test_a_case_of_a_pattern_that_removed_another_place(far: Store) -> None:
    """The case s3-glob-delete: `out[ab]` is no pattern of `outa`."""
    far.clear()
    pairs = Path(__file__).parents[1] / "cases" / "s3-glob-delete" / "pairs.csv"
    words = ("-q", "--tokenizer", "train:300")
    assert call("shard", pairs, f"{far.root}/outa", *words).status == 0
    before = far.stamps()
    for overwrite in ((), ("--seed", "1", "--overwrite")):
        assert call("shard", pairs, f"{far.root}/out[ab]", *words, *overwrite).status == 0
        assert {key: stamp for key, stamp in far.stamps().items() if key.startswith("outa/")} == before
    assert call("data", "drop", f"{far.root}/out[ab]").status == 0
    assert far.stamps() == before


@pytest.mark.slow
def test_names_with_a_leading_dash_and_other_odd_ones(loop: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Real processes, with a miner of their own, in the folder in which the names are."""
    for name in ("-x", "a::b"):
        here = tmp_path / f"of {name}"
        here.mkdir()
        shutil.copytree(loop[0] / "data", here / name)
        extremis("run", "astra", f"./{name}", f"./{name}-run", *TRAIN, "--set", "refresh.stale=wait", cwd=here)
        extremis("mine", "--for-epoch", "9", "--", name, f"{name}-run", cwd=here)
        extremis("export", f"./{name}", f"./{name}-run", f"./{name}-export", cwd=here)
        extremis("predict", f"./{name}-export", loop[0] / "texts.jsonl", f"./{name}.csv", cwd=here)
        made = {f"{name}{end}" for end in ("", "-run", "-export", ".csv")}
        assert {path.name for path in here.iterdir()} == made
        assert (here / f"{name}-run/negatives/epoch-0002/queries/_manifest.json").exists()
