"""Who may import whom (DESIGN section 2), over the syntax tree; and what a process does not load."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from extremis.cli import cli

ROOT = Path(__file__).parents[1]
OURS = ("schemas", "search", "trainer", "pipelines", "extremis", "recipes", "benchmarks", "tests")
MAY_IMPORT = {
    "schemas": {"schemas"},
    "search": {"schemas", "search"},
    "trainer": {"schemas", "search", "trainer", "recipes"},
    "pipelines": {"schemas", "search", "pipelines"},
    "extremis": {"schemas", "search", "trainer", "pipelines", "extremis", "recipes"},
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in MAY_IMPORT
    for path in sorted((ROOT / package).rglob("*.py"))
}


@cache
def imports_of(module: str, *, when_loaded: bool = False) -> frozenset[str]:
    """Absolute names of what `module` imports: anywhere in it, or only `when_loaded` (not within functions)."""
    tree = ast.parse(MODULES[module].read_text())
    found: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            # `from package import name` may name a module or something in one.
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif not (when_loaded and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            pending.extend(ast.iter_child_nodes(node))
    return frozenset(_module_of(name) for name in found)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] if name not in MODULES and name.rpartition(".")[0] in MODULES else name


def top(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    allowed = MAY_IMPORT[top(module)] | ({"trainer"} if module == "pipelines.embed" else set())
    wrong = {name for name in imports_of(module) if top(name) in OURS and top(name) not in allowed}
    assert not wrong, f"{module} imports {sorted(wrong)}; {top(module)} may import {sorted(allowed)}"


@pytest.mark.parametrize("module", MODULES)
def test_only_pipelines_know_beam_and_only_the_trainer_knows_torch(module: str) -> None:
    owners = {"apache_beam": {"pipelines"}, "faiss": {"search", "pipelines"}, "torch": {"trainer"}}
    wrong = {name for name in imports_of(module) if top(name) in owners and top(module) not in owners[top(name)]}
    assert not wrong, f"{module} imports {sorted(wrong)}"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Within functions too: a cycle that is hidden in a function is still one."""
    finished: set[str] = set()

    def follow(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "import cycle: " + " -> ".join([*path[path.index(module) :], module])
        if module in finished:
            return
        for name in sorted(imports_of(module) & MODULES.keys()):
            follow(name, (*path, module))
        finished.add(module)

    for module in MODULES:
        follow(module, ())
    assert finished == MODULES.keys()


def test_the_check_sees_what_it_should() -> None:
    assert "trainer.model" in imports_of("pipelines.embed")
    assert "pipelines.shard" in imports_of("extremis.commands.shard")
    assert "pipelines.shard" not in imports_of("extremis.commands.shard", when_loaded=True)
    assert len(MODULES) > 40


HEAVY = ("torch", "transformers", "apache_beam", "faiss")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("schemas.shard_files.parquet", ("torch", "apache_beam", "faiss", "trainer", "pipelines", "extremis")),
        ("pipelines.shard", ("torch", "transformers", "faiss", "trainer", "extremis")),
        ("pipelines.mine", ("torch", "transformers", "trainer", "extremis")),
        ("trainer.loop", ("apache_beam", "faiss", "pipelines", "extremis")),
        ("trainer.evaluation.evaluate", ("apache_beam", "faiss", "pipelines", "extremis")),
        ("extremis.cli", HEAVY),
    ],
)
def test_a_process_loads_only_its_side(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert top(module) in loaded.stdout.split()
    assert not set(absent) & set(loaded.stdout.split())


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from extremis.cli import main\n"
        "sys.argv = ['extremis', '--help']\n"
        "try: main()\n"
        f"finally: print('loaded:', *{{n.split('.')[0] for n in sys.modules}} & {set(HEAVY)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "Usage: extremis" in done.stdout
    assert done.stdout.splitlines()[-1].strip() == "loaded:"


@pytest.mark.parametrize("name", ["", *cli.commands])
def test_every_commands_help_has_an_example(name: str) -> None:
    command = cli.commands[name] if name else cli
    text = command.help or ""
    assert "Example" in text
    assert f"extremis {name}".rstrip() in text.partition("Example")[2]
