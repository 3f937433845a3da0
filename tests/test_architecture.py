"""Who may import whom, over the syntax tree; and what a process does not load."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.command import environment

ROOT = Path(__file__).parents[1]
HEART, ROOMS = ("schemas", "search", "trainer", "pipelines"), ("scoring", "extremis")
OURS = (*HEART, *ROOMS, "recipes", "benchmarks", "papers", "tests")
MAY_IMPORT = {
    "schemas": {"schemas"},
    "search": {"schemas", "search"},
    "trainer": {"schemas", "search", "trainer", "recipes"},
    "pipelines": {"schemas", "search", "pipelines"},
    "scoring": {"schemas", "search", "trainer", "pipelines", "recipes", "scoring"},
    "extremis": {"schemas", "search", "trainer", "pipelines", "recipes", "scoring", "extremis"},
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in MAY_IMPORT
    for path in sorted((ROOT / package).rglob("*.py"))
}

ENCODERS = {"pipelines.embed", "pipelines.models", "pipelines.mining.derived"}  # they load models
BY_TEXT = {"import_module", "import_name", "__import__"}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def imports_of(module: str, *, when_loaded: bool = False) -> frozenset[str]:
    """Absolute names of what `module` imports: anywhere in it, or only `when_loaded` (not within functions).

    A name that is given to a function as text, import_module("trainer.loop"), is imported as well. A table of kinds and
    their places is not: a base class does not depend on the classes that extend it.
    """
    found: set[str] = set()
    pending: list[ast.AST] = [tree_of(module)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            # `from package import name` may name a module or something in one.
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif not (when_loaded and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_TEXT:
                texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
                found.update(text.partition(":")[0] for text in texts if isinstance(text, str))
            pending.extend(ast.iter_child_nodes(node))
    return frozenset(_module_of(name) for name in found)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] if name not in MODULES and name.rpartition(".")[0] in MODULES else name


def top(name: str) -> str:
    return name.split(".")[0]


def test_imports_go_one_way() -> None:
    wrong = []
    for module in MODULES:
        allowed = MAY_IMPORT[top(module)] | ({"trainer"} if module in ENCODERS else set())
        names = (name for name in imports_of(module) if top(name) in OURS and top(name) not in allowed)
        wrong += [f"{module} imports {name}" for name in names]
    assert not wrong


def test_the_heart_names_no_room() -> None:
    """Not as a text either, "module:name" in a table of kinds."""
    wrong = []
    for module in MODULES:
        texts = (node.value for node in ast.walk(tree_of(module)) if isinstance(node, ast.Constant))
        named = {text.partition(":")[0] for text in texts if isinstance(text, str) and "." in text} & MODULES.keys()
        wrong += [f"{module} names {name}" for name in named if top(module) in HEART and top(name) in ROOMS]
    assert not wrong


def test_only_pipelines_know_beam_and_only_the_trainer_knows_torch() -> None:
    owners = {"apache_beam": {"pipelines"}, "faiss": {"search"}}
    owners["torch"] = {"trainer", "scoring", "search.torch_topk"}
    wrong = []
    for module in MODULES:
        for name in imports_of(module):
            if top(name) in owners and not {top(module), module} & owners[top(name)]:
                wrong.append(f"{module} imports {name}")
    assert not wrong


def cycle_in(arrows: dict[str, set[str]]) -> str:
    """Return the first cycle of a graph as text; empty: there is none."""
    finished: set[str] = set()

    def follow(name: str, path: tuple[str, ...]) -> str:
        if name in path:
            return " -> ".join([*path[path.index(name) :], name])
        if name not in finished:
            for target in sorted(arrows[name]):
                if cycle := follow(target, (*path, name)):
                    return cycle
            finished.add(name)
        return ""

    return next((cycle for name in arrows if (cycle := follow(name, ()))), "")


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Within functions too: a cycle that is hidden in a function is still one."""
    arrows = {module: set(imports_of(module) & MODULES.keys()) for module in MODULES}
    assert not cycle_in(arrows)


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
    assert {"trainer.heads", "trainer.loop", "pipelines.mining"} <= arrows.keys()
    assert not cycle_in(arrows)


def test_a_cycle_is_seen() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == "b -> c -> b"
    assert not cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_nobody_asks_which_head_encoder_loss_or_source_there_is() -> None:
    families = {
        f"trainer.{folder}": {
            node.name
            for module in MODULES
            if room(module) == f"trainer.{folder}"
            for node in ast.walk(tree_of(module))
            if isinstance(node, ast.ClassDef)
        }
        for folder in ("heads", "encoders", "losses", "negatives")
    }
    assert all(families.values())
    wrong = []
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                kinds = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                if {folder for folder, classes in families.items() if kinds & classes} - {room(module)}:
                    wrong.append(f"{module}:{node.lineno} asks for {sorted(kinds)}")
    assert not wrong


def test_the_check_sees_what_it_should() -> None:
    assert "trainer.model" in imports_of("pipelines.embed")
    assert "pipelines.shard" in imports_of("extremis.training")
    assert "pipelines.shard" not in imports_of("extremis.training", when_loaded=True)


HEAVY = ("torch", "transformers", "apache_beam", "faiss")


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("schemas.shard_files.parquet", ("torch", "apache_beam", "faiss", "trainer", "pipelines", "extremis")),
        ("pipelines.shard", ("torch", "transformers", "faiss", "trainer", "extremis")),
        ("pipelines.mine", ("torch", "transformers", "trainer", "extremis")),
        (
            "trainer.loop, trainer.evaluation.evaluate, trainer.negatives.indexes",
            ("apache_beam", "faiss", "pipelines", "extremis"),
        ),
        ("extremis.cli", HEAVY),
        ("extremis.training, extremis.using", (*HEAVY, "numba", "pyarrow", "numpy", "fsspec")),
        ("scoring.predict", ("torch", "transformers", "apache_beam", "numba", "scipy")),
        ("scoring.onnx_inference", ("torch", "transformers", "apache_beam", "numba", "scipy")),
        ("extremis.versioning", (*HEAVY, "search", "pipelines", "numba", "tokenizers", "safetensors")),
    ],
)
def test_a_process_loads_only_its_side(modules: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {modules}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert top(modules) in loaded.stdout.split()
    assert not set(absent) & set(loaded.stdout.split())


def test_a_typo_in_a_recipe_needs_neither_arrow_nor_fsspec() -> None:
    code = (
        "import sys; from extremis.cli import main\n"
        "heavy = {'numpy', 'pyarrow', 'fsspec', 'torch', 'rich'}\n"
        "try: main(['run', 'astra', 'data', 'runs/1', '--set', 'train.epoch=5'])\n"
        "finally: print('loaded:', *{n.split('.')[0] for n in sys.modules} & heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "did you mean 'epochs'" in done.stderr
    assert done.stdout.splitlines()[-1].strip() == "loaded:"


def test_help_needs_nothing_heavy() -> None:
    heavy = {*HEAVY, "rich", "pydantic", "numpy"}
    code = (
        "import sys; from extremis.cli import main\n"
        "sys.argv = ['extremis', '--help']\n"
        "try: main()\n"
        f"finally: print('loaded:', *{{n.split('.')[0] for n in sys.modules}} & {heavy!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "Usage: extremis" in done.stdout
    assert "Tokenize and shard raw data from INPUT to DATA.\n" in done.stdout
    assert "extremis run auto" in done.stdout.partition("Example")[2]
    assert done.stdout.splitlines()[-1].strip() == "loaded:"


@pytest.mark.parametrize(
    ("commands", "absent"),
    [
        (("--version", "shrad"), {*HEAVY, "rich", "pydantic", "numpy"}),
        (("shard rows.csv data", "inspect data"), {*HEAVY, "numba", "scipy", "sklearn", "pandas"}),
    ],
)
def test_commands_load_what_they_use(commands: tuple[str, ...], absent: set[str], tmp_path: Path) -> None:
    rows = (f"{row},a text of words {row},{row % 3}|x\n" for row in range(20))
    (tmp_path / "rows.csv").write_text("key,text,labels\n" + "".join(rows))
    code = (
        "import contextlib, sys; from extremis.cli import main\n"
        f"for command in {commands!r}:\n"
        "    with contextlib.suppress(SystemExit): main(command.split())\n"
        "print('loaded:', *{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    *_, loaded = done.stdout.splitlines()
    assert "extremis" in loaded.split(), done.stderr
    assert not absent & {*loaded.split()}
    assert "shard" not in commands[0] or (tmp_path / "data" / "_manifest.json").exists(), done.stderr
