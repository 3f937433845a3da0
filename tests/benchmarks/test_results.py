"""The page of results and its records: made of them, complete, and a record's age told by its code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.common.report import report

CODE = '''"""Reads."""


def read(path: str, rows: int) -> int:
    """Return the rows."""
    if rows < 1:
        raise ValueError(f"{path} has no rows")
    print("reading", path)
    return rows + 1
'''


def test_the_page_is_made_of_complete_records() -> None:
    records = results.read_records()
    assert len(records) > 20
    assert {record["name"]: results.missing(record) for record in records if results.missing(record)} == {}
    assert results.PAGE.read_text() == results.page(records), "run `python -m benchmarks.results`"
    assert len(results.PAGE.read_text().split()) <= 3000


def test_records_name_code_that_exists() -> None:
    paths = {path for record in results.read_records() for path in record["files"]}
    assert {path for path in paths if not (results.ROOT / path).exists()} == set()


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ('"""Return the rows."""', '"""Return the number of rows, at least 1."""', True),
        ('"""Reads."""\n', "", True),
        ('f"{path} has no rows"', 'f"no rows in {path}: give another file"', True),
        ('"reading", path', '"reads", path', True),
        ("rows + 1", "rows  +  1  # and the head", True),
        ("rows + 1", "rows + 2", False),
        ("rows < 1", "rows < 0", False),
        ("ValueError", "KeyError", False),
        ("path: str", "url: str", False),
    ],
)
def test_a_changed_body_is_noticed_but_not_a_changed_text(before: str, after: str, same: bool) -> None:
    changed = CODE.replace(before, after)
    assert changed != CODE
    assert (results.syntax_tree(changed) == results.syntax_tree(CODE)) == same


def test_check_names_a_record_whose_code_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, folder, page = tmp_path / "code" / "read.py", tmp_path / "records", tmp_path / "page.md"
    source.parent.mkdir()
    folder.mkdir()
    source.write_text(CODE)
    record = {**results.read_records()[0], "files": ["code"], "digest": results.digest(["code"], root=tmp_path)}
    (folder / "some.json").write_text(json.dumps({**record, "name": "some"}))
    page.write_text(results.page(results.read_records(folder), tmp_path))
    assert results.check(folder, page, tmp_path) == 0
    source.write_text(CODE.replace("has no rows", "is empty"))
    assert results.check(folder, page, tmp_path) == 0
    assert capsys.readouterr().out == ""
    source.write_text(CODE.replace("rows + 1", "rows"))
    assert results.check(folder, page, tmp_path) == 1  # the page does not list it yet
    assert "stale: some" in capsys.readouterr().out
    page.write_text(results.page(results.read_records(folder), tmp_path))
    assert "Measured before the code changed" in page.read_text()
    assert results.check(folder, page, tmp_path) == 0
    (folder / "some.json").write_text(json.dumps({**record, "claim": ""}))
    assert results.check(folder, page, tmp_path) == 1
    assert "some: no claim" in capsys.readouterr().out


def test_a_digest_is_of_the_code_at_a_commit_or_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
    (tmp_path / "read.py").write_text(CODE)
    (tmp_path / "recipe.toml").write_text("# why\nepochs = 8\n")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    first = results.digest(["read.py", "recipe.toml"], "HEAD")
    assert results.digest(["read.py", "recipe.toml"], root=tmp_path) == first
    (tmp_path / "recipe.toml").write_text("# another reason\nepochs = 8\n")
    assert results.digest(["read.py", "recipe.toml"], root=tmp_path) == first
    (tmp_path / "recipe.toml").write_text("epochs = 9\n")
    assert results.digest(["read.py", "recipe.toml"], root=tmp_path) != first
    assert results.digest(["read.py", "recipe.toml"], "HEAD") == first


def test_a_report_replaces_the_record_of_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "RECORDS", tmp_path)
    monkeypatch.setattr(results.read_records, "__defaults__", (tmp_path,))
    monkeypatch.setattr(sys, "argv", ["stream.py"])
    report("a claim", {"rows/s": {"one": 2.5}, "rounds": 3}, {"one / two": 0.5}, {"one / two": 0.4})
    body = {**json.loads(capsys.readouterr().out), "command": "python -m benchmarks.stream"}
    results.keep(body)
    (new,) = results.read_records()
    assert results.missing(new) == ["read"]  # a sentence about the figures is written by hand
    assert new["rows"] == [["rows/s: one", 2.5], ["rounds", 3], ["one / two", "0.5 (bar 0.4)"]]
    results.save({**new, "title": "Rates", "section": "The stream", "read": "It is fast.", "files": ["trainer/stream"]})
    results.keep({**body, "ratios": {"one / two": 0.6}})
    (again,) = results.read_records()
    assert (again["title"], again["files"], again["read"]) == ("Rates", ["trainer/stream"], "")
    assert again["rows"][-1] == ["one / two", "0.6 (bar 0.4)"]
    results.keep({**body, "command": "python -m benchmarks.stream --labels 1e6"})
    assert [record["name"] for record in results.read_records()] == ["stream", "stream_labels_1e6"]
