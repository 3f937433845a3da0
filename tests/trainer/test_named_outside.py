"""Names from outside: where a module is sought, what its digest is of, and what is refused."""

import hashlib
import sys
from pathlib import Path

import pytest

from schemas.errors import InputError
from trainer.modules import find_named, open_named

MODULE = "class Mine:\n    number = {}\n"


def write(file: Path, number: int = 1) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(MODULE.format(number))
    return file


def test_a_module_beside_comes_before_one_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, on_path = (write(tmp_path / name / "sought_first.py", n) for n, name in enumerate(("beside", "path")))
    write(tmp_path / "path" / "sought_then.py", 2)
    monkeypatch.syspath_prepend(tmp_path / "path")
    named = open_named("sought_first:Mine", str(tmp_path / "beside"))
    assert (named.object.number, named.file) == (0, beside)
    assert named.sha256 == hashlib.sha256(beside.read_bytes()).hexdigest()
    assert open_named("sought_then:Mine", str(tmp_path / "beside")).object.number == 2
    with pytest.raises(InputError, match=r"Rename one of the two modules, or start another process"):
        open_named("sought_first:Mine", str(on_path.parent))


def test_without_a_folder_it_is_sought_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "deep" / "here.py", 3)
    monkeypatch.chdir(tmp_path)
    assert open_named("deep.here:Mine").object.number == 3


def test_a_file_replaces_no_module_of_its_name(tmp_path: Path) -> None:
    before = sys.modules["json"]
    assert open_named("json:Mine", str(write(tmp_path / "json.py", 4).parent)).object.number == 4
    assert sys.modules["json"] is before


def test_a_package_is_all_its_files(tmp_path: Path) -> None:
    write(tmp_path / "whole" / "inner.py", 5)
    (tmp_path / "whole" / "__init__.py").write_text("from .inner import Mine\n")
    first = open_named("whole:Mine", str(tmp_path))
    assert first.object.number == 5
    write(tmp_path / "whole" / "inner.py", 6)
    second = open_named("whole:Mine", str(tmp_path))
    assert second.object.number == 6
    assert second.sha256 != first.sha256


def test_a_changed_file_is_read_again_and_an_equal_one_is_not(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "changed.py", 7).parent)
    first = open_named("changed:Mine", folder)
    assert open_named("changed:Mine", folder) is first
    write(tmp_path / "changed.py", 8)
    assert open_named("changed:Mine", folder).object.number == 8


def test_what_cannot_be_opened_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import json\n\n1 / 0\n")
    write(tmp_path / "there.py")
    for name, message in (
        ("nowhere:Mine", rf"no module 'nowhere' in {tmp_path} or on Python's path. Put nowhere.py there"),
        ("a.b.nowhere:Mine", "no module 'a.b.nowhere'"),
        ("there:Mien", r"there.py has no 'Mien'. Did you mean 'Mine'\?"),
        ("broken:Mine", r"importing \S+broken.py failed: ZeroDivisionError: division by zero. Fix it"),
        ("there:", "expected module:name"),
        ("../there:Mine", "expected module:name"),
        ("sys:path", "no module 'sys'"),
    ):
        with pytest.raises(InputError, match=message) as error:
            open_named(name, str(tmp_path), f"method = {name!r}")
        assert f"method = '{name}'" in str(error.value)


def test_a_stored_name_is_found_only_if_a_person_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "stored.py", 9)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r'score.json needs code from outside.*allow="stored:Mine"'):
        find_named("stored:Mine", "score.json")
    assert not any(name.startswith("stored") for name in sys.modules)
    monkeypatch.setenv("EXTREMIS_ALLOW", "other:Name,stored:Mine")
    assert find_named("stored:Mine", "score.json").number == 9
