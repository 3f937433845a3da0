"""Who may import whom, over the syntax tree; and what a process does not load."""

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

VAGUE = {"found", "one", "at", "given", "known", "chosen"}
QUESTIONS = {"What", "Whether", "How", "Of", "Where", "Who", "Which", "When"}


def classes_below(package: str) -> frozenset[str]:
    """Return the names of all classes in a folder."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / package).rglob("*.py")]
    return frozenset(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


FAMILIES = {
    f"trainer.{folder}": classes_below(f"trainer/{folder}") for folder in ("heads", "encoders", "losses", "negatives")
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
    owners = {"apache_beam": {"pipelines"}, "faiss": {"search", "pipelines"}, "torch": {"trainer", "search.on_device"}}
    within = {top(module), module}
    wrong = {name for name in imports_of(module) if top(name) in owners and not within & owners[top(name)]}
    assert not wrong, f"{module} imports {sorted(wrong)}"


def test_one_place_maps_files() -> None:
    mapping = {name for name, path in MODULES.items() if "mmap" in imports_of(name) or "memmap(" in path.read_text()}
    memory = {"trainer.rows.memory", "trainer.stream.loader_workers"}  # these map memory
    assert mapping == {"schemas.mapped", *memory}, "map files by schemas.mapped"


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


def room(module: str) -> str:
    """Return the folder inside its package that a module is in, or the module where it is loose."""
    parts = module.split(".")
    inside = len(parts) > 2 or (len(parts) == 2 and MODULES[module].name == "__init__.py")
    return ".".join(parts[:2]) if inside else module


def test_folders_do_not_import_each_other_in_a_circle() -> None:
    arrows: dict[str, set[str]] = {}
    for module in MODULES:
        targets = {room(name) for name in imports_of(module) & MODULES.keys() if top(name) == top(module)}
        arrows.setdefault(room(module), set()).update(targets - {room(module)})
    finished: set[str] = set()

    def follow(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "cycle of folders: " + " -> ".join([*path[path.index(name) :], name])
        if name not in finished:
            for target in sorted(arrows[name]):
                follow(target, (*path, name))
            finished.add(name)

    for name in arrows:
        follow(name, ())
    assert {"trainer.heads", "trainer.loop", "pipelines.mining"} <= finished


def test_one_place_waits_for_others() -> None:
    """A loop that sleeps elsewhere is a thread's rhythm, or a pause that was said."""
    rhythms = {"schemas.owners.claim", "pipelines.common.progress", "extremis.spinner", "extremis.miner"}
    sleeping = set()
    for module, path in MODULES.items():
        loops = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.While | ast.For)]
        calls = [call.func for loop in loops for call in ast.walk(loop) if isinstance(call, ast.Call)]
        if any(isinstance(call, ast.Attribute) and call.attr in ("sleep", "wait") for call in calls):
            sleeping.add(module)
    assert sleeping == {"schemas.waits", *rhythms}


def test_the_loop_is_the_loop_and_nothing_else() -> None:
    assert len((ROOT / "trainer" / "loop.py").read_text().splitlines()) <= 200


@pytest.mark.parametrize("module", MODULES)
def test_functions_take_at_most_seven_parameters(module: str) -> None:
    """Constructors of plain data are not written out, so none of them is among the functions.

    A GPU's kernel takes pointers one by one.
    """
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            arguments = node.args
            names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            names = [name for name in names if name not in ("self", "cls")]
            assert len(names) <= 7, f"{module}.{node.name} has {len(names)} parameters: {names}"


@pytest.mark.parametrize("module", MODULES)
def test_nobody_asks_which_head_encoder_loss_or_source_there_is(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            kinds = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
            folders = {folder for folder, classes in FAMILIES.items() if kinds & classes}
            assert folders <= {room(module)}, f"{module}:{node.lineno} asks for {sorted(kinds)}"


@pytest.mark.parametrize("module", MODULES)
def test_names_and_docstrings_are_plain(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assert node.id not in VAGUE, f"{module}:{node.lineno} {node.id}: call it what it is"
        if isinstance(node, ast.arg):
            assert node.arg not in VAGUE, f"{module}:{node.lineno} {node.arg}: call it what it is"
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            where = f"{module}:{getattr(node, 'lineno', 1)}"
            assert not words or words[0] not in QUESTIONS, (
                f"{where} begins with {words[0]}: say what it does, verb first"
            )


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


def test_a_typo_in_a_recipe_needs_neither_arrow_nor_fsspec() -> None:
    code = (
        "import sys; from extremis.cli import main\n"
        "try: main(['run', 'astra', 'data', 'runs/1', '--set', 'train.epoch=5'])\n"
        "finally: print('loaded:', *{n.split('.')[0] for n in sys.modules} & {'pyarrow', 'fsspec', 'torch'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "did you mean 'epochs'" in done.stderr
    assert done.stdout.splitlines()[-1].strip() == "loaded:"


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
