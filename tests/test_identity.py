"""Which code wrote something: the commit is in the wheel, in what is written, and never in a digest."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import schemas
from schemas import storage
from schemas.logs import json_line
from schemas.manifest import Manifest, open_manifest, publish
from tests.command import ROOT, call
from trainer.recipe_files import changed_versions, dump_config, load_config, load_recipe


def git(folder: Path, *words: str) -> str:
    who = "-c", "user.name=a", "-c", "user.email=a@b"
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with what the build needs of this one."""
    folder = tmp_path / "checkout"
    (folder / "schemas").mkdir(parents=True)
    shutil.copy(ROOT / "schemas" / "__init__.py", folder / "schemas")
    for name in ("setup.py", "README.md"):
        shutil.copy(ROOT / name, folder)
    (folder / "setup.cfg").write_text("[metadata]\nname = x\nversion = 1\n[options]\npackages = schemas\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def told(folder: Path) -> str:
    """What the code in `folder` says of itself, in a process within another repository's hook."""
    program = "import schemas; print(schemas.commit())"
    env = {**os.environ, "PYTHONPATH": str(folder), "GIT_DIR": str(ROOT / ".git")}
    words = [sys.executable, "-c", program]
    return subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_a_checkout_asks_git(checkout: Path, tmp_path: Path) -> None:
    first = git(checkout, "rev-parse", "--short=12", "HEAD")
    assert told(checkout) == first
    with (checkout / "setup.cfg").open("a") as file:
        file.write("# changed\n")
    assert told(checkout) == f"{first}+dirty"
    inside = checkout / "site-packages"  # of an environment within a checkout of something else
    shutil.copytree(checkout / "schemas", inside / "schemas")
    assert told(inside) == schemas.UNKNOWN


@pytest.mark.parametrize("named", ["", "0123456789abcdef0123"])
def test_a_build_writes_the_commit_into_the_package(checkout: Path, tmp_path: Path, named: str) -> None:
    """`named`: of an image, whose build has no repository."""
    env = {**os.environ, "EXTREMIS_COMMIT": named}
    words = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "built")]
    subprocess.run(words, cwd=checkout, env=env, check=True, capture_output=True)
    assert told(tmp_path / "built") == (named[:12] or git(checkout, "rev-parse", "--short=12", "HEAD"))
    assert not (checkout / "schemas" / "_commit.py").exists()


def test_no_digest_covers_the_commit(tmp_path: Path) -> None:
    written = [publish(str(tmp_path / name), Manifest(kind="queries", commit=name)) for name in ("a1", "b2+dirty")]
    opened = [open_manifest(str(tmp_path / name)) for name in ("a1", "b2+dirty")]
    assert opened == written
    assert [table.commit for table in opened] == ["a1", "b2+dirty"]
    assert opened[0].digest == opened[1].digest
    body = json.loads((tmp_path / "a1" / "_manifest.json").read_text())
    del body["commit"], body["seal"]
    (tmp_path / "a1" / "_manifest.json").write_text(json.dumps(body))
    assert open_manifest(str(tmp_path / "a1")).commit == schemas.UNKNOWN  # not that of this process


def test_everything_written_names_the_commit(tmp_path: Path) -> None:
    assert json.loads(json_line("info", "message", "words"))["commit"] == schemas.commit()
    assert Manifest(kind="queries").commit == schemas.commit()
    assert call("--version").out == f"extremis, version {schemas.code_version()}, commit {schemas.commit()}\n"


def test_a_resume_by_another_build_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path / "config.toml")
    storage.write_bytes(place, dump_config(load_recipe("astra")))
    assert not changed_versions(load_config(place))
    monkeypatch.setattr("trainer.recipe_files.commit", lambda: "f00")
    expected = f"started with commit {schemas.commit()}, resumed with commit f00"
    assert changed_versions(load_config(place)) == expected
