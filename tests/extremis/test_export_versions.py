"""Versions of an export: what changed is written, the rest is named, and a folder has one that is current."""

import itertools
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import extremis
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.table import Table
from scoring.export_versions import CURRENT, ExportVersion, make_current
from scoring.exported import Exported
from tests.command import call, refused
from tests.days import TINY
from tests.pipelines.test_versions import contents, rows_of

TEXTS = ["text 1", "t3 u9", "t5", "u12 u13 again"]
SWITCHES = 100


def export(days: Path, number: int, out: Path, run: Path | None = None, **options: Any) -> Path:
    run = run or days / f"run{number}"
    extremis.export(days / f"data{number}", run, out, progress=False, **options)
    return out


def answers(place: Path) -> list[list[tuple[str, str, float | None]]]:
    """Predictions of an export for TEXTS: keys, texts and scores of all labels."""
    found = extremis.load(place).predict(TEXTS, max_labels=9)
    return [[(label.key, label.text, label.score) for label in each.labels] for each in found]


@pytest.fixture(scope="module")
def frozen(days: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the second version that goes on from run0, and moves no vector of old labels."""
    run = tmp_path_factory.mktemp("frozen") / "run"
    still = {**TINY, "classifier.lr": 1e-30, "train.epochs": 1}
    extremis.train("random", days / "data1", run, from_run=days / "run0", set=still, progress=False)
    return run


@pytest.mark.parametrize("index", ["none", "IVF2,Flat"])
@pytest.mark.parametrize("moves", [True, False])
def test_a_version_predicts_as_a_whole_export_does(
    days: Path, frozen: Path, tmp_path: Path, index: str, moves: bool
) -> None:
    run = None if moves else frozen
    first = export(days, 0, tmp_path / "0", index=index)
    before = contents(str(first))
    second = export(days, 1, tmp_path / "1", run, index=index, onto=first)
    assert answers(second) == answers(export(days, 1, tmp_path / "whole", run, index=index))
    assert contents(str(first)) == before
    manifest = open_manifest(str(second), "export")
    Table(str(second), manifest).verify()
    written = {str(path.relative_to(second)) for path in second.rglob("*") if path.is_file()}
    assert written == {"_manifest.json", *manifest.files}
    named = {entry.path for entry in manifest.shards if entry.view is not None}
    assert any(path.startswith("labels/") for path in named)
    assert any(path.startswith("vectors/") for path in named) is not moves
    assert (second / "encoder" / "model.safetensors").exists()  # a folder that others open
    table = Exported.open(str(second)).label_table(("label_id", "key", "text", "frequency", "retired"))
    rows = rows_of(DataLayout(f"{days}/data1").labels)
    assert table.to_pylist() == [{name: row[name] for name in table.column_names} for row in rows]


def test_what_has_not_changed_is_named(days: Path, tmp_path: Path) -> None:
    first = export(days, 1, tmp_path / "1", index="IVF2,Flat")
    again = export(days, 1, tmp_path / "again", index="IVF2,Flat", onto=first)
    assert answers(again) == answers(first)
    assert not [name for name in contents(str(again)) if name.startswith(("vectors/", "labels/", "index/"))]
    third = export(days, 1, tmp_path / "third", index="IVF2,Flat", onto=again)
    assert [place for _, place, _ in ExportVersion.of(open_manifest(str(third))).needs] == ["../1"]
    assert answers(third) == answers(first)


def test_a_finished_version_is_kept_and_another_one_refused(days: Path, tmp_path: Path) -> None:
    first, other = export(days, 0, tmp_path / "0"), export(days, 0, tmp_path / "other", dtype="float16")
    second = export(days, 1, tmp_path / "1", onto=first)
    before = contents(str(second))
    export(days, 1, second, onto=first)
    assert contents(str(second)) == before
    for onto in ({"onto": other}, {}):
        with pytest.raises(InputError, match=r"made with other options .options.onto was"):
            export(days, 1, second, **onto)
    export(days, 1, second, overwrite=True)
    assert not [entry for entry in open_manifest(str(second)).shards if entry.view]
    assert {str(path.relative_to(second)) for path in second.rglob("*") if path.is_file()} == {
        "_manifest.json",
        *open_manifest(str(second)).files,
    }


def test_an_export_of_other_data_is_refused(days: Path, tmp_path: Path) -> None:
    later = export(days, 1, tmp_path / "1")
    with pytest.raises(InputError, match=r"this export was built neither from .*data0 nor from an earlier version"):
        export(days, 0, tmp_path / "0", onto=later)
    with pytest.raises(InputError, match="this is OUT itself"):
        export(days, 1, later, onto=later)
    with pytest.raises(TableError, match="no table here"):
        export(days, 1, tmp_path / "2", onto=tmp_path / "nothing")


def test_an_export_that_is_gone_is_named_with_its_part(days: Path, tmp_path: Path) -> None:
    first = export(days, 0, tmp_path / "0")
    second = export(days, 1, tmp_path / "1", onto=first)
    shutil.rmtree(first)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    done = call("predict", second, tmp_path / "texts.txt", tmp_path / "out.jsonl")
    refused(
        done, f"{second}: files that this version needs are missing: part 0001 ({first}) is missing", "Restore them"
    )
    export(days, 1, first)
    with pytest.raises(TableError, match=r"part 0001 \(.*0\) has been rebuilt since"):
        extremis.load(second)


def test_a_folder_answers_by_its_current_export(days: Path, tmp_path: Path) -> None:
    first = export(days, 0, tmp_path / "0", current=True)
    model = extremis.load(tmp_path)
    assert (model.url, model.is_current) == (str(first), True)
    before = model.predict(TEXTS, max_labels=9)
    for _ in range(2):  # killed right after it was made current, and run again
        second = export(days, 1, tmp_path / "1", onto=tmp_path, current=True)
        assert (tmp_path / CURRENT).read_text() == "1\n"
        assert ExportVersion.of(open_manifest(str(second))).onto == "../0"
    assert not model.is_current
    assert model.predict(TEXTS, max_labels=9) == before
    assert extremis.load(tmp_path).url == str(second)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    done = extremis.predict(tmp_path, tmp_path / "texts.txt", tmp_path / "out.jsonl", max_labels=9, progress=False)
    assert done.export == str(second)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["labels"] for row in rows] == [[key for key, _, _ in row] for row in answers(second)]


@pytest.mark.parametrize("store", ["memory"])
def test_versions_beyond_a_local_disk(days: Path, tmp_path: Path, store: str) -> None:
    root = f"{store}://{tmp_path.name}"
    for number, onto in ((0, None), (1, root)):
        options = {} if onto is None else {"onto": onto}
        extremis.export(
            days / f"data{number}", days / f"run{number}", f"{root}/{number}", current=True, progress=False, **options
        )
    model = extremis.load(root)
    assert model.url == f"{root}/1"
    local = extremis.load(export(days, 1, tmp_path / "1"))
    assert model.predict(TEXTS, max_labels=9) == local.predict(TEXTS, max_labels=9)


def test_answers_are_of_one_version_while_current_switches(days: Path, tmp_path: Path) -> None:
    folder = tmp_path / "exports"
    first = export(days, 0, folder / "0", index="IVF2,Flat", current=True)
    second = export(days, 1, folder / "1", index="IVF2,Flat", onto=folder)
    expected = {str(place): answers(place) for place in (first, second)}
    assert expected[str(first)] != expected[str(second)]
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    seen: set[str] = set()
    moments = switching([first, second])
    for number, _ in enumerate(moments):
        model = extremis.load(folder)
        found = [
            [(label.key, label.text, label.score) for label in row.labels] for row in model.predict(TEXTS, max_labels=9)
        ]
        assert found == expected[model.url]
        seen.add(model.url)
        if number % 10 == 0:  # made and asked beside, in this process
            more = export(days, 1, folder / f"more{number}", index="IVF2,Flat", onto=folder)
            assert answers(more) == expected[str(second)]
            out = tmp_path / "out.jsonl"
            done = extremis.predict(folder, tmp_path / "texts.txt", out, max_labels=9, overwrite=True, progress=False)
            rows = [json.loads(line) for line in out.read_text().splitlines()]
            assert [row["labels"] for row in rows] == [[key for key, _, _ in row] for row in expected[done.export]]
    assert seen == set(expected)


def switching(places: list[Path]) -> Iterator[None]:
    """Make each of `places` current in turn from another thread, SWITCHES times in all; yields until that is done."""
    paces, errors = threading.Semaphore(0), []

    def work() -> None:
        try:
            for place in itertools.islice(itertools.cycle(places), SWITCHES):
                paces.acquire()
                make_current(str(place))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        paces.release()  # one switch while the caller opens and asks, at any moment of it
        yield
    thread.join()
    assert not errors


def test_an_export_that_is_dropped_once_another_is_current_is_not_missed(days: Path, tmp_path: Path) -> None:
    """Whoever reads CURRENT just before a switch, and finds the export gone, opens the new one."""
    first = export(days, 0, tmp_path / "0", current=True)
    second = export(days, 1, tmp_path / "1")
    opened = Exported._open.__func__

    def late(cls: type[Exported], url: str, *rest: Any) -> Exported:
        if url == str(first):
            make_current(str(second))
            shutil.rmtree(first)
        return opened(cls, url, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exported, "_open", classmethod(late))
        assert extremis.load(tmp_path).url == str(second)
    shutil.rmtree(second)
    with pytest.raises(TableError, match="1: no table here"):
        extremis.load(tmp_path)


def test_exports_are_listed_and_dropped(days: Path, tmp_path: Path) -> None:
    first = export(days, 0, tmp_path / "0", current=True)
    second = export(days, 1, tmp_path / "1", onto=first)
    listed = extremis.data("list", tmp_path, progress=False)
    assert (listed.versions, listed.to_json()["current"]) == ([], "0")
    assert [(each["export"], each["needs"], each["fault"]) for each in listed.exports] == [
        ("0", [], None),
        ("1", ["0"], None),
    ]
    with pytest.raises(InputError, match="the current export of"):
        extremis.data("drop", first, progress=False)
    make_current(str(second))
    with pytest.raises(InputError, match=r"0: files of this export are needed by .*/1"):
        extremis.data("drop", first, progress=False)
    make_current(str(first))
    extremis.data("drop", second, progress=False)
    assert [each["export"] for each in extremis.data("list", tmp_path, progress=False).exports] == ["0"]
    assert not list(second.rglob("*.*"))
