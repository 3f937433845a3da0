"""A release measures each record once, whatever cuts it; a report is current while the code that it ran is the same."""

import re
import shutil
import string
import subprocess
from pathlib import Path
from typing import Any

import pytest

import schemas
from benchmarks import release
from benchmarks.common import imported_code

CODE = '''"""Reads."""


def read(path: str, rows: int) -> int:
    """Return the rows."""
    if rows < 1:
        raise ValueError(f"{path} has no rows")
    print("reading", path)
    return rows + 1
'''
# A process, a process that it starts, and a fork that is killed; each imports a module.
TINY = """
import json, os, signal, subprocess, sys
import search.first
subprocess.run([sys.executable, "-c", "import search.second"], check=True)
if not (child := os.fork()):
    import search.third
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
print(json.dumps({"claim": "it counts", "figures": {"two": [2, 1, 3]}, "holds": False, "date": "2026-01-01",
                  "machine": {"cores": 2}}))
"""
RECORDS = """
[one]
title = "One"
section = "Training"
claim = "It counts."
commands = ["python -m benchmarks.tiny"]
minutes = 1
columns = ["figure", "value"]
rows = [["two", "{0[figures][two]:interval}"]]
read = "Read."
[more]
title = "More"
section = "Faults"
claim = "It counts."
commands = ["python -m benchmarks.tiny 1", "python -m benchmarks.tiny", "python -m benchmarks.tiny 2"]
minutes = 3
columns = ["value"]
rows = [["{2[figures][two][0]}"], ["{0[figures][ten]}"]]
read = ""
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkout with one benchmark, in place of this one."""
    shutil.copytree(imported_code.NOTING, tmp_path / imported_code.NOTING.relative_to(release.ROOT))
    files = {f"search/{name}.py": CODE for name in ("first", "second", "third", "fourth", "__init__")}
    files |= {"benchmarks/__init__.py": "", "benchmarks/tiny.py": TINY, "benchmarks/release.toml": RECORDS}
    for name, text in (files | {"benchmarks/results/older.md": "### More\n\nOlder.\n", ".gitignore": "*.pyc"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "docs").mkdir()
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    root = release.ROOT
    for module, names in ((release, ("ROOT", "RECORDS", "REPORTS", "PAGE")), (imported_code, ("ROOT", "NOTING"))):
        for name in names:
            monkeypatch.setattr(module, name, tmp_path / getattr(module, name).relative_to(root))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def test_a_report_is_current_until_code_of_any_of_its_processes_changes(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.main(["--only", "one"]) == 0
    (report,) = release.read_records()[0].reports.values()
    ran = ["search/__init__.py", *(f"search/{name}.py" for name in ("first", "second", "third"))]
    assert report["code"].keys() == {*ran, "benchmarks/__init__.py", "benchmarks/tiny.py"}
    current, older = release.PAGE.read_text().split(release.OLDER)
    assert all(text in current for text in ("|two|+2 (+1, +3)|", "A bar is missed.", f"Commit {report['commit']}"))
    assert "### More\n\nOlder.\n" in older
    for name in (*ran, "search/fourth.py", "benchmarks/release.toml"):
        whole = (checkout / name).read_text()
        (checkout / name).write_text(whole.replace("rows + 1", "rows").replace("Return the rows", "Return"))
        assert imported_code.changed(report["code"]) == [name] * (name in ran)
        (checkout / name).write_text(whole.replace("Return the rows", "Return"))
        assert imported_code.changed(report["code"]) == []
    assert release.main(["--only", "more"]) == 2  # one of its three is current; with a changed file none is measured
    assert "search/first.py" in capsys.readouterr().err


def test_wherever_it_is_cut_each_command_is_measured_once(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cut in range(4):
        for place in release.REPORTS.glob("*.json"):
            place.unlink()
        begun: list[str] = []

        def keep(command: str, raw: Path | None, begun: list[str] = begun, cut: int = cut) -> bool:
            begun.append(command)
            if len(begun) == cut + 1:
                raise KeyboardInterrupt
            body: dict[str, Any] = {"figures": {"two": [2, 1, 3]}, "holds": True, "date": "", "machine": {"cores": 2}}
            release.save(release.REPORTS / release.file_of(command), body | {"commit": "x", "seconds": 60, "code": {}})
            return True

        monkeypatch.setattr(release, "keep", keep)
        assert release.main(["--minutes", "0.9"]) == 0  # each is expected to take one
        assert begun == []
        assert release.main([]) == (130 if cut < 3 else 0)
        assert release.main([]) == 0
        assert "|2|\n|not measured|" in release.PAGE.read_text()
        assert begun[:cut] + begun[cut + (cut < 3) :] == [f"python -m benchmarks.tiny{end}" for end in ("", " 1", " 2")]


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ('"""Return the rows."""', '"""Return the number of rows, at least 1."""', True),
        ('"""Reads."""\n', "", True),
        ('f"{path} has no rows"', 'f"no rows in {path}: give another file"', True),
        ('"reading", path', '"reads", path', True),
        ("rows + 1", "rows  +  1  # and the head", True),
        ("path: str", "path: str | None", True),
        ("-> int", "-> bool", True),
        ("rows + 1", "rows + 2", False),
        ("rows < 1", "rows < 0", False),
        ("ValueError", "KeyError", False),
        ("path: str", "url: str", False),
    ],
)
def test_a_changed_body_is_noticed_but_not_a_changed_text(before: str, after: str, same: bool) -> None:
    changed = CODE.replace(before, after)
    assert changed != CODE
    assert (imported_code.syntax_tree(changed) == imported_code.syntax_tree(CODE)) == same


def test_the_page_has_each_record_once_and_is_made_of_them() -> None:
    records = release.read_records()
    text = release.PAGE.read_text()
    assert text == release.page(records), "run `python -m benchmarks.release --page`"
    assert sorted(re.findall("^### (.*)", text, re.MULTILINE)) == sorted(record.title for record in records)
    assert len(text.split()) <= 3000
    for record in records:
        parts = [part for text in sum(record.rows, [record.read]) for part in string.Formatter().parse(text)]
        assert {int(name.partition("[")[0]) for _, name, *_ in parts if name} <= {*range(len(record.commands))}
        assert {len(row) for row in record.rows} == {len(record.columns)}
        assert record.section in release.SECTIONS
    commands = {command for record in records for command in record.commands}
    assert len({*map(release.file_of, commands)}) == len(commands)


def test_readme_quotes_current_records_or_names_their_commit() -> None:
    """A release quotes only what is current; before it, README names the commit of each record that it quotes."""
    readme = (release.ROOT / "README.md").read_text()
    shown = dict(re.findall(r"^### (.*)\n((?:(?!#).*\n)+)", release.PAGE.read_text(), re.MULTILINE))
    anchors = {
        re.sub(r"[^\w -]", "", record.title.lower()).replace(" ", "-"): record for record in release.read_records()
    }
    linked = re.findall(r"docs/results\.md#([\w-]+)", readme)
    quoted = [anchors[name] for name in linked]
    for record in quoted:
        (commit,) = re.findall(r"\*Commit (\w+)", shown[record.title])
        assert record.current or ("dev" in schemas.VERSION and commit in readme), record.name
    figures = [float(each) for record in quoted for each in re.findall(r"\d+(?:\.\d+)?", shown[record.title])]
    about = [
        text for text in re.split(r"\n\n|^- ", readme, flags=re.MULTILINE) if "results.md#" in text or "|" in text[:2]
    ]
    for number in {each for text in about for each in re.findall(r"\d+\.\d+", re.sub(r"\]\([^)]*\)|`.*?`", "", text))}:
        near = 0.5000001 * 10.0 ** -len(number.partition(".")[2])
        assert any(abs(each / scale - float(number)) <= near for each in figures for scale in (1, 100)), number
