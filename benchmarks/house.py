"""How much code there is, and how much of it a command enters.

    python -m benchmarks.house [--json] [--checkout DIR]

Counts lines, files and functions of the packages; the heart is `schemas`, `search`, `pipelines` and `trainer` without
the files that only use trained runs. Then `shard`, `train`, `mine`, and `shard` of rows without labels run under a
profiler, each in a process of its own, on so few rows of CSV that this process does all the work. Counted are the files
and functions of ours that are entered in any thread, imports and class bodies included, and the deepest stack of our
frames. A steady step is what steps 21 to 40 enter, from the beginning of a step to that of the next.
"""

import argparse
import ast
import importlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

HEART = ("schemas", "search", "pipelines", "trainer")
PACKAGES = (*HEART, "scoring", "extremis")
ROOMS = re.compile(  # files in the heart's folders that only use trained runs
    r"trainer/(export|linear|tuples)/|trainer/encoders/(onnx_|torch_inference)|"
    r"trainer/evaluation/(baselines|calibration|fitting|fusion|memory|tfidf|thresholds|tree|votes)"
)
ROWS, LABELS, WORDS = 1_500, 60, 800
STEP, STEADY = "take_step", range(21, 41)  # the function that takes a step, and the steps that are counted
COMMANDS = {
    "shard": "shard rows.csv data",  # 49 steps an epoch, and a dump after epoch 0:
    "train": "train astra data run --set order.batch=32 --set train.epochs=3 --set refresh.start=2",
    "mine": "mine data run",
    "rows without labels": "shard unlabelled.csv none",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object, no tables")
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1], help="count this one instead")
    arguments = parser.parse_args()
    root = arguments.checkout.resolve()
    figures = {**count(root), "entered": entered(root)}
    for title, rows in figures.items() if not arguments.json else ():
        print(title, *(f"  {name:42} " + re.sub("[{}']", "", str(value)) for name, value in rows.items()), sep="\n")
    from benchmarks.common.report import report  # not at the top: processes under the profiler read this file, too

    git = ["git", "-C", str(root), "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    report("a heart that one can read, and commands that enter few files", figures, {}, {}, commit=commit)


def count(root: Path) -> dict[str, dict[str, Any]]:
    """Return lines and files of each package, and the sizes of files and functions; imports do not name a function."""
    paths = [path for package in (*PACKAGES, "tests") for path in (root / package).rglob("*.py")]
    texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    lines = {name: text.count("\n") for name, text in texts.items()}
    ours = [name for name in texts if not name.startswith("tests/")]
    heart = [name for name in ours if name.startswith(HEART) and not ROOMS.match(name)]
    groups = [(each, [name for name in texts if name.startswith(f"{each}/")]) for each in (*PACKAGES, "tests")]
    groups += [("all packages", ours), ("heart", heart)]
    nodes = [node for name in ours for node in ast.walk(ast.parse(texts[name]))]
    named = Counter(getattr(node, "id", getattr(node, "attr", None)) for node in nodes)
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    lengths = [(function.end_lineno or 0) - function.lineno + 1 for function in functions]
    outer = {each for node in nodes if isinstance(node, ast.Module) for each in node.body}
    once = [each for each in functions if each in outer and named[each.name] == 1]
    longest = max(ours, key=lines.__getitem__)
    return {
        "size": {name: {"lines": sum(lines[each] for each in some), "files": len(some)} for name, some in groups},
        "shape": {
            "longest file": f"{longest}, {lines[longest]} lines",
            "files under 60 lines, without __init__": sum(lines[name] < 60 and "__init__" not in name for name in ours),
            "functions": len(functions),
            "lines of the median function": statistics.median(lengths),
            "functions of a module that are named once": len(once),
        },
    }


def entered(root: Path) -> dict[str, dict[str, int]]:
    """Run the commands of the checkout; return what each enters. Raises SystemExit for a wrong exit status."""
    found: dict[str, dict[str, int]] = {}
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        for name, labels in (("rows", [f"label {number}" for number in range(LABELS)]), ("unlabelled", ["", ""])):
            texts = (" ".join(f"word{draw.randrange(WORDS)}" for _ in range(8)) for _ in range(ROWS))
            rows = [f"{text} {row},{'|'.join(draw.sample(labels, 2))}".rstrip("|") for row, text in enumerate(texts)]
            Path(folder, f"{name}.csv").write_text("\n".join(["text,labels", *rows, ""]), encoding="utf-8")
        for name, words in COMMANDS.items():
            command = [sys.executable, __file__, "--profile", str(root), name, *words.split()]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode != (2 if name == "rows without labels" else 0):
                raise SystemExit(f"extremis {words}: exit status {done.returncode}\n{done.stderr[-2000:]}")
            found |= json.loads(done.stdout.splitlines()[-1])
    return found


def profile(root: str, name: str, *words: str) -> None:
    """Run a command of the checkout in this process, print what it enters, and exit with its status."""
    ours = tuple(os.path.join(root, package, "") for package in (*PACKAGES, "recipes"))
    functions: dict[str, set[tuple[str, str]]] = {"a steady step": set(), name: set()}
    depths, most = Counter[int](), Counter[str]()

    def look(frame: FrameType, event: str, _: object) -> None:
        code, thread = frame.f_code, threading.get_ident()
        if event in ("call", "return") and code.co_filename.startswith(ours):
            depths[thread] += 1 if event == "call" else -1
            if event == "call":
                most["deepest"] = max(most["deepest"], depths[thread])
                most["steps"] += code.co_name == STEP
                for part in functions if most["steps"] in STEADY else (name,):
                    functions[part].add((code.co_filename, getattr(code, "co_qualname", code.co_name)))

    sys.path[0], status = root, None  # the folder of this file is no place for imports
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        importlib.import_module("extremis.cli").main(words)
    except SystemExit as end:
        status = end.code
    sys.setprofile(None)
    if words[0] == "train" and most["steps"] < STEADY.stop:
        sys.exit(f"{STEP} was called {most['steps']} times, not {STEADY.stop}: set STEP to the function of a step")
    found = {part: {"files": len(dict(some)), "functions": len(some)} for part, some in functions.items() if some}
    found[name]["deepest"] = most["deepest"]
    print(json.dumps(found))
    sys.exit(status)


if __name__ == "__main__":
    profile(*sys.argv[2:]) if sys.argv[1:2] == ["--profile"] else main()
