"""What nobody needs is removed: never what a resume, the miner, a reader or another version needs, whatever happens."""

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import extremis
from extremis.retention import find_unneeded, remove
from extremis.supervisor import train
from pipelines.mine import mine
from pipelines.options import MineOptions
from schemas import owners, storage
from schemas.errors import AccessError, InputError
from schemas.layout import RunLayout, list_numbers
from schemas.manifest import Manifest, open_manifest, publish, write_file
from schemas.storage import join
from scoring.export_versions import make_current
from tests import days as small
from tests.command import TINY
from tests.pipelines.test_versions import SEQUENCE, make
from trainer.loop import EpochReport
from trainer.methods.sections import LEAD
from trainer.recipe_files import dump_config, load_recipe

MONTH = 30 * 86400.0


@pytest.fixture(scope="module", autouse=True)
def without_fsync() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "_sync", lambda *_: None)
        yield


def table(url: str, kind: str, **facts: Any) -> str:
    """Publish a table of one file, and return its digest."""
    shard = write_file(url, "files/part", f"{url} {facts}".encode())
    return publish(url, Manifest(kind=kind, shards=(shard,), **facts)).digest


def wholes(folder: Path) -> set[str]:
    """Return the published tables below `folder`; each has all of its files."""
    found = {str(path.parent) for path in folder.rglob("_manifest.json")}
    for url in found:
        assert all(storage.exists(join(url, name)) for name in open_manifest(url).files), url
    return found


class Run:
    """A run of some epochs as trainer and miner write it, and, apart from `retention`, all that may be needed of it."""

    def __init__(self, root: Path, keep: int, checkpoints: int, every: int, clustered: bool) -> None:
        self.run, self.keep, self.checkpoints, self.every, self.clustered = (
            RunLayout(str(root)),
            keep,
            checkpoints,
            every,
            clustered,
        )
        self.root, self.epoch, self.step, self.is_finished = root, 0, 0, False
        self.adopted: dict[int, int | None] = {}
        self.saved: list[tuple[int, int]] = []  # step, epoch
        self.dumped, self.mined = list[int](), list[int]()
        recipe = load_recipe("astra", [*TINY, f"refresh.keep={keep}", f"checkpoint.keep={checkpoints}"])
        storage.write_bytes(self.run.config, dump_config(recipe))

    def table(self, number: int) -> str:
        return self.run.clusters(number, "queries") if self.clustered else self.run.negatives(number, "queries")

    def save(self) -> None:
        self.step += 1
        progress = {"epoch": self.epoch, "global_step": self.step}
        table(self.run.checkpoint(self.step), "checkpoint", parameters={"progress": progress})
        self.saved = [*self.saved, (self.step, self.epoch)]
        for step, _ in self.saved[: -self.checkpoints]:
            storage.remove(self.run.checkpoint(step), recursive=True)
        self.saved = self.saved[-self.checkpoints :]

    def adopt(self) -> None:
        """Follow the recorded decision, or take the newest table and record it."""
        due = [number for number in self.mined if number <= self.epoch]
        self.adopted.setdefault(self.epoch, max(due, default=None))
        body = {"table_epoch": self.adopted[self.epoch]}
        storage.write_json(self.run.adoption(self.epoch), body)

    def end_epoch(self) -> None:
        if self.epoch not in self.dumped and self.epoch % self.every == 0:
            names = ["queries"] if self.clustered else ["queries", "vectors"]
            for name in names:
                table(self.run.embeddings(self.epoch, name), "embeddings")
            self.dumped.append(self.epoch)
        self.epoch += 1
        self.save()

    def mine(self) -> None:
        if waiting := [epoch for epoch in self.dumped if epoch + LEAD not in self.mined]:
            table(self.table(waiting[0] + LEAD), "queries" if self.clustered else "negatives")
            self.mined.append(waiting[0] + LEAD)

    def resume(self) -> None:
        """A kill: the run goes on from the checkpoint, which repeats steps of epochs that were decided."""
        if self.saved:
            self.step, self.epoch = self.saved[-1]
        else:
            self.step = self.epoch = 0

    def finish(self) -> None:
        storage.write_bytes(self.run.finished, b"{}")
        self.is_finished = True

    def needed(self) -> set[str]:
        """Return the tables that whatever may happen next reads."""
        newest = {self.table(number) for number in sorted(self.mined)[-self.keep :]}
        if self.is_finished:
            return newest
        waiting = [epoch for epoch in self.dumped if epoch + LEAD not in self.mined]
        found = newest | {self.run.embeddings(epoch, "queries") for epoch in waiting}
        for epoch in waiting:  # the miner compares with the table before; clusters of a dump are in the order of one
            found |= {self.table(n) for n in [max((m for m in self.mined if m < epoch + LEAD), default=None)] if n}
            found |= {self.table(n) for n in [self.adopted.get(epoch)] if n is not None}
        for start in [epoch for _, epoch in self.saved] or [0]:
            found |= {self.run.embeddings(epoch, "queries") for epoch in self.dumped if epoch >= start}
            found |= {self.table(n) for epoch, n in self.adopted.items() if epoch >= start and n is not None}
            upcoming = [n for n in self.mined if n >= max((n for n in self.adopted.values() if n), default=0)]
            found |= {self.table(number) for number in upcoming}
        return found


ACTS = ("adopt", "save", "end_epoch", "mine", "clean")


@settings(max_examples=25)
@given(
    acts=st.lists(st.sampled_from([*ACTS, *ACTS, "resume"]), min_size=10, max_size=50),
    keep=st.integers(1, 3),
    checkpoints=st.integers(1, 3),
    every=st.integers(1, 3),
    clustered=st.booleans(),
    finishes=st.booleans(),
)
def test_nothing_that_a_run_may_need_is_removed(
    tmp_path_factory: pytest.TempPathFactory,
    acts: list[str],
    keep: int,
    checkpoints: int,
    every: int,
    clustered: bool,
    finishes: bool,
) -> None:
    run = Run(tmp_path_factory.mktemp("run"), keep, checkpoints, every, clustered)
    for act in [*acts, *(["finish"] if finishes else []), "clean"]:
        if act == "clean":
            remove(find_unneeded(str(run.root)))
            assert find_unneeded(str(run.root)) == []
        elif act in ("save", "end_epoch"):
            run.adopt()  # before the first step of an epoch
            getattr(run, act)()
        else:
            getattr(run, act)()
        present = wholes(run.root)
        assert run.needed() <= present, act
    if finishes:
        assert {url for url in present if "checkpoints" not in url} == run.needed()


class Folder:
    """Data sets and exports in one folder, with random needs among them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.needs: dict[str, set[str]] = {}
        self.digests: dict[str, str] = {}
        self.versions: dict[str, dict[str, Any]] = {}

    def data(self, name: str, onto: str | None, needs: set[str]) -> None:
        before = self.versions.get(onto or "", {"number": 0, "lineage": []})
        lineage = [*before["lineage"], *([self.digests[onto]] if onto else [])]
        named = [*((need, f"../{need}") for need in sorted(needs)), (name, ".")]
        version = {"number": before["number"] + 1, "lineage": lineage, "part": name, "needs": named}
        self.versions[name] = {**version, "onto": onto, "digest": None, "retired": 0, "choices": {}}
        self._publish(name, needs, "data", {"version": self.versions[name], "labels": 1})

    def export(self, name: str, needs: set[str]) -> None:
        named = [(need, f"../{need}", self.digests[need]) for need in sorted(needs)]
        facts = {"vocabulary": 1, "features": 0, "max_tokens": 1, "dimension": 1, "recipe": {}}
        version = {"part": name, "onto": None, "digest": None, "needs": named}
        self._publish(name, needs, "export", {**facts, "version": version})

    def _publish(self, name: str, needs: set[str], kind: str, parameters: dict[str, Any]) -> None:
        url, self.needs[name] = str(self.root / name), needs
        if kind == "data":
            table(join(url, "labels"), "labels")
            self.digests[name] = publish(url, Manifest(kind=kind, parameters=parameters)).digest
        else:
            self.digests[name] = table(url, kind, parameters=parameters)

    def kept(self, names: set[str]) -> set[str]:
        """Return `names`, and all that they need."""
        while (more := names | {need for name in names for need in self.needs[name]}) != names:
            names = more
        return names


def age(path: Path) -> None:
    os.utime(path, (time.time() - MONTH,) * 2)


@settings(max_examples=60)
@given(st.data(), st.integers(1, 6), st.integers(0, 6), st.integers(1, 2))
def test_versions_and_exports_are_removed_if_nothing_needs_them(
    tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject, data_sets: int, exports: int, keep: int
) -> None:
    folder = Folder(tmp_path_factory.mktemp("folder"))
    names = [[f"{kind}{number}" for number in range(count)] for kind, count in (("d", data_sets), ("e", exports))]
    for kind, made in zip("de", names, strict=True):
        for number, name in enumerate(made):
            needs = draw.draw(st.sets(st.sampled_from(made[:number]))) if number else set[str]()
            if kind == "e":
                folder.export(name, needs)
            else:
                folder.data(name, draw.draw(st.sampled_from([None, *made[:number]])), needs)
    current = draw.draw(st.sampled_from([None, *names[1]]))
    if current:
        (folder.root / "CURRENT").write_text(current)
    families = {name: (version["lineage"] or [folder.digests[name]])[0] for name, version in folder.versions.items()}
    old = set[str]()
    for name in itertools.chain(*names):
        is_export, stamp = name[0] == "e", folder.root / name / "_manifest.json"
        if is_export and draw.draw(st.booleans()):
            stamp = folder.root / name / ".replaced"
            stamp.touch()
        is_old, state = draw.draw(st.booleans()), draw.draw(st.sampled_from(["", "", "read", "ended"]))
        if is_old:
            age(stamp)
        if state:
            owner = owners.Owner.here("read")
            owner = replace(owner, born="0") if state == "ended" else owner
            owners.Claim(str(folder.root / name), owner)._write_beat()
        if is_export:
            is_behind = stamp.name == ".replaced" and name != current
        else:
            numbers = {folder.versions[each]["number"] for each in families if families[each] == families[name]}
            is_behind = folder.versions[name]["number"] < sorted(numbers)[-keep:][0]
        if is_old and is_behind and state != "read":
            old.add(name)
    kept = folder.kept({*itertools.chain(*names)} - old)
    dry = find_unneeded(str(folder.root), keep, 7 * 86400)
    gone = remove(dry)
    assert gone == dry
    assert {Path(each.root).name for each in gone} == {*itertools.chain(*names)} - kept
    assert {path.name for path in folder.root.iterdir()} - {"CURRENT"} == kept
    wholes(folder.root)
    for name in kept:
        assert all((folder.root / need / "_manifest.json").exists() for need in folder.needs[name])


class Killed(BaseException):
    pass


def killed(act: Callable[[], object], left: int) -> bool:
    """Run `act`, killed after `left` writes and removals; return whether it was killed."""

    def strike(real: Callable[..., Any]) -> Callable[..., Any]:
        def struck(url: str, *args: Any, **options: Any) -> Any:
            nonlocal left
            if not url.rpartition("/")[2].startswith((".claim", ".kind")):  # else the claim would live on
                left -= 1
                if left < 0:
                    raise Killed
            return real(url, *args, **options)

        return struck

    with pytest.MonkeyPatch.context() as patch:
        for name in ("remove", "write_bytes"):
            patch.setattr(storage, name, strike(getattr(storage, name)))
        try:
            act()
        except Killed:
            return True
    return False


def test_a_crash_at_every_step_leaves_whole_tables_and_the_next_clean_finishes(tmp_path: Path) -> None:
    root = tmp_path / "whole"
    run, folder = Run(root / "run", 1, 1, 1, clustered=False), Folder(root)
    for _ in range(4):
        run.adopt()
        run.end_epoch()
        run.mine()
    folder.export("e1", set())
    folder.export("e2", {"e1"})
    folder.export("e3", set())
    (root / "CURRENT").write_text("e3")
    folder.data("d1", None, set())
    folder.data("d2", "d1", set())
    left = [root / "e1" / ".replaced", root / "e2" / ".replaced", root / "d1" / "_manifest.json"]
    left += [root / "d2" / "parts" / "old" / "labels" / "part", root / "e3" / ".staging" / "part"]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        age(path)

    def clean(place: Path) -> object:
        return extremis.clean(place, progress=False)

    def files(place: Path) -> set[str]:
        return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}

    undisturbed = shutil.copytree(root, tmp_path / "undisturbed")
    clean(undisturbed)
    assert {path.name for path in undisturbed.iterdir()} == {"run", "CURRENT", "d2", "e3"}
    assert {path.name for path in (undisturbed / "run" / "negatives").iterdir()} == {f"epoch-000{n}" for n in (3, 4, 5)}
    assert not any("old" in name or ".staging" in name or "dumps" in name for name in files(undisturbed))
    for steps in itertools.count():
        place = shutil.copytree(root, tmp_path / f"killed-{steps}")
        is_killed = killed(lambda place=place: clean(place), steps)  # type: ignore[misc]
        wholes(place)
        clean(place)
        assert files(place) == files(undisturbed)
        if not is_killed:
            break
    assert steps > 40


@pytest.fixture
def folder(exports: Path, tmp_path: Path) -> Path:
    """A folder of two exports, of which the second has become current long ago."""
    folder = tmp_path / "exports"
    shutil.copytree(exports, folder, ignore=shutil.ignore_patterns(".claim*"))  # of models that other tests hold
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    for name in names:
        make_current(str(folder / name))
    age(folder / names[0] / ".replaced")
    return folder


def cleaned(folder: Path, **options: Any) -> list[str]:
    found = extremis.clean(folder, progress=False, **options)
    return [Path(str(each["place"])).name for each in found.removed]


def test_an_export_in_use_stays_until_its_reader_has_gone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, current = sorted(path.name for path in folder.iterdir() if path.is_dir())
    model = extremis.load(folder / old)
    assert cleaned(folder) == []
    with pytest.raises(InputError, match="being read by process"):
        extremis.data("drop", folder / old, progress=False)
    del model
    assert not [*folder.rglob(".claim*")]
    assert cleaned(folder, dry_run=True) == [old]
    assert cleaned(folder, older_than="60d") == []
    make_current(str(folder / old))  # back, and forth again
    assert cleaned(folder) == []
    make_current(str(folder / current))
    assert cleaned(folder) == []
    age(folder / old / ".replaced")
    assert cleaned(folder) == [old]
    assert extremis.load(folder).url == str(folder / current)


def test_a_reader_that_cannot_write_says_that_it_holds_no_lease(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise AccessError("no permission to write")

    monkeypatch.setattr(storage, "write_sealed", refuse)
    assert extremis.load(folder).predict(["a ship"])
    assert (
        "in use without a lease, so that extremis clean does not know of it: no permission" in capsys.readouterr().err
    )


def bytes_by_epoch(data: str, run: str, epochs: int, keep: int) -> list[int]:
    """Train with a miner that works between epochs; return the bytes of checkpoints, dumps and tables after each."""
    sizes = list[int]()

    def mine_and_weigh(report: EpochReport) -> bool:
        if report.epoch + LEAD < epochs:
            mine(data, run, report.epoch, MineOptions(audit_queries=1))
        kept = ("checkpoints/", "dumps/", "negatives/")
        sizes.append(sum(each.size for name, each in storage.list_below(run).items() if name.startswith(kept)))
        return True

    more = {"train.epochs": epochs, "refresh.keep": keep, "refresh.every": 1, "refresh.start": 2, "negatives.hard": 2}
    more |= {"refresh.source": "table", "checkpoint.every_epochs": 1, "checkpoint.background": "false"}
    changes = [f"{key}={str(value).lower()}" for key, value in {**small.TINY, **more}.items()]
    train(data, run, load_recipe("random", changes), should_continue=mine_and_weigh)
    return sizes


@pytest.mark.parametrize("epochs", [9, pytest.param(60, marks=pytest.mark.slow)])
def test_the_storage_of_many_epochs_is_that_of_a_few(tmp_path: Path, epochs: int) -> None:
    make(tmp_path, SEQUENCE[:1])
    sizes = bytes_by_epoch(str(tmp_path / "data0"), str(tmp_path / "run"), epochs, keep=2)
    assert len(sizes) == epochs
    assert max(sizes) <= 1.02 * max(sizes[:6])  # tables of other vectors are compressed otherwise
    extremis.clean(tmp_path / "run", keep=1, progress=False)
    assert list_numbers(RunLayout(str(tmp_path / "run")).negatives_root) == [epochs - 1]
    assert list_numbers(RunLayout(str(tmp_path / "run")).dumps) == []
