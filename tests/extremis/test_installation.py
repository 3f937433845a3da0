"""A package of ours that another one shadows is named; so is the extra that something absent is of."""

import subprocess
import sys
from pathlib import Path

import pytest

from extremis.installation import OURS, extra_of, require_ours
from schemas.errors import InputError, MissingExtra
from tests.command import ROOT, environment


@pytest.mark.parametrize("name", OURS)
def test_a_foreign_package_of_our_name_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    foreign = tmp_path / name / "__init__.py"
    foreign.write_text("")
    path = environment({"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    done = subprocess.run(
        [sys.executable, "-c", "import extremis"],
        cwd=tmp_path.parent,
        env=path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"{foreign} shadows {ROOT / name / '__init__.py'}" in last
    assert "environment of its own" in last


def test_a_package_that_is_nowhere_is_named() -> None:
    require_ours()
    with pytest.raises(ImportError, match=r"`no_such_package`.* is not on the path"):
        require_ours(["no_such_package"])


def test_what_an_extra_brings_is_said_with_how_to_install_it() -> None:
    assert extra_of("torch.nn") == "trainer"
    assert extra_of("apache_beam") == "pipelines"
    assert extra_of("numpy") is None
    error = MissingExtra("a report needs jinja2", "report")
    assert isinstance(error, InputError)
    assert "'.[report]'" in str(error)
    assert "extremis_xc-" in str(error)
