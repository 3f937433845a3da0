"""A package of ours that another one shadows is named; so is the extra that something absent is of."""

import subprocess
import sys
from pathlib import Path

import pytest

from extremis.installation import _EXTRAS, OWN_PACKAGES, check_own_packages, extra_of
from schemas.errors import InputError, missing_extra
from tests.command import PROCESSES, ROOT, environment
from tests.wheel import SETUP

IMPORT = (sys.executable, "-c", "import extremis")
COMMAND = (sys.executable, "-m", "extremis", "--help")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Console scripts, as setup.cfg names them and pip writes them."""
    folder = tmp_path_factory.mktemp("bin")
    for line in SETUP["options.entry_points"]["console_scripts"].strip().splitlines():
        name, place = line.split(" = ")
        module, function = place.split(":")
        program = f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)
    return folder


def run(*words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose path is `PYTHONPATH` of `variables`; by default the checkout alone."""
    env = environment({"PYTHONPATH": str(ROOT), **variables})
    return subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def shadow(folder: Path, name: str, as_file: bool) -> Path:
    """Write a module of the user's, whose name is one of ours."""
    place = folder / f"{name}.py" if as_file else folder / name / "__init__.py"
    place.parent.mkdir(exist_ok=True)
    place.write_text("")
    return place


@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("name", OWN_PACKAGES)
def test_a_name_that_is_taken_in_the_current_folder_is_one_message(name: str, as_file: bool, tmp_path: Path) -> None:
    foreign = shadow(tmp_path, name, as_file)
    told = f"`{name}`, but {foreign} shadows {ROOT / name / '__init__.py'}. Rename it, start from another folder, or "
    done = run(*COMMAND, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert told in line
    assert "PYTHONSAFEPATH=1" in line
    done = run(*IMPORT, cwd=tmp_path)
    assert done.returncode == 1  # an ImportError, which a program may catch
    assert told in done.stderr.splitlines()[-1]
    if sys.version_info >= (3, 11):  # the remedy
        assert run(*COMMAND, cwd=tmp_path, PYTHONSAFEPATH="1").returncode == 0


@pytest.mark.parametrize("command", ["extremis", "extremis-worker"])
def test_a_name_that_is_taken_on_the_path_ends_a_program_with_one_message(
    command: str, programs: Path, tmp_path: Path
) -> None:
    foreign = shadow(tmp_path, "pipelines", False)
    done = run(programs / command, "--help", cwd=tmp_path.parent, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"{foreign} shadows" in line
    assert line.endswith(f"Rename it, or remove {tmp_path} from PYTHONPATH.")
    # An installed program does not look into the current folder.
    assert run(programs / command, "--help", cwd=tmp_path).returncode == 0


def test_folders_of_data_with_our_names_shadow_nothing(tmp_path: Path) -> None:
    for name in OWN_PACKAGES:
        (tmp_path / name / "files").mkdir(parents=True)
        (tmp_path / name / "module.py").write_text("")
    assert run(*COMMAND, cwd=tmp_path).returncode == 0
    assert run(*IMPORT, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}").returncode == 0


def test_workers_have_the_modules_of_the_process_that_starts_them(programs: Path, tmp_path: Path) -> None:
    """Python puts the current folder first for `-c` and `-m`; the program that starts the workers was not there."""
    for name in OWN_PACKAGES:
        shadow(tmp_path, name, False).write_text("raise SystemExit('a foreign module')")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "labels.jsonl").write_text('{"key": "ships", "text": "ships"}\n')
    rows = (f'{{"key": "q{row}", "text": "a ship", "labels": ["ships"]}}\n' for row in range(20))
    (tmp_path / "raw" / "train.jsonl").write_text("".join(rows))
    words = ("shard", "raw", "data", "--json", "--", *PROCESSES)
    done = run(programs / "extremis", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data" / "_manifest.json").exists()


def test_a_package_that_is_nowhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_own_packages()
    monkeypatch.setattr("extremis.installation.OWN_PACKAGES", ["no_such_package"])
    with pytest.raises(ImportError, match=r"`no_such_package`.* is not on Python's path"):
        check_own_packages()


def test_what_an_extra_brings_is_said_with_how_to_install_it() -> None:
    assert extra_of("torch.nn") == "trainer"
    assert extra_of("apache_beam") == "pipelines"
    assert extra_of("numpy") is None
    assert set(_EXTRAS) <= set(SETUP["options.extras_require"])
    error = missing_extra("a report needs jinja2", "report")
    assert isinstance(error, InputError)
    assert "'.[report]'" in str(error)
    assert "extremis_xc-" in str(error)
