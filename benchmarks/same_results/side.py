"""One checkout's side, run by path as `side.py CHECKOUT STEPS.json` in the folder for its outputs.

Libraries are loaded once. Each command is a fork of this process, with the checkout first on its path.
"""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the steps in order; write statuses, standard output and standard error of each step into its folder."""
    checkout, file = sys.argv[1:]
    sys.path[0] = checkout
    os.environ["PYTHONPATH"] = checkout  # for the processes that commands start
    load_libraries(checkout)
    failed: set[str] = set()
    for step in json.loads(Path(file).read_text()):
        start = time.monotonic()
        if failed.intersection(step["needs"]) or not run_step(step, checkout):
            failed.add(step["name"])
        outcome = "failed" if step["name"] in failed else "done"
        sys.stderr.write(f"{checkout}: {step['name']} {outcome}, {time.monotonic() - start:.0f} s\n")


def load_libraries(checkout: str) -> None:
    """Import the libraries of commands. Raises SystemExit if the code would come from a different place."""
    import apache_beam  # noqa: F401
    import faiss  # noqa: F401
    import numba  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import schemas

    if not str(schemas.__file__).startswith(checkout + os.sep):
        sys.exit(f"{schemas.__file__}: not in {checkout}")


def run_step(step: dict[str, Any], checkout: str) -> bool:
    """Run a step's commands until a command fails; return whether all commands succeeded."""
    folder = Path(step["name"])
    folder.mkdir(exist_ok=True)
    for number, command in enumerate(step["commands"]):
        status = run_command(with_recipe(command, checkout), folder / f"{number}-{command[0]}")
        if status:
            (folder / "failed").write_text(f"{' '.join(command)}: status {status}\n")
            return False
    return True


def with_recipe(command: list[str], checkout: str) -> list[str]:
    """Return the command, with a path for its recipe if the checkout has the recipe only in papers/."""
    if "run" not in command[:2]:
        return command
    place = command.index("run") + 1
    paths = [str(path) for path in Path(checkout, "papers").glob(f"*/{command[place]}.toml")]
    return [*command[:place], *(paths or [command[place]]), *command[place + 1 :]]


def run_command(command: list[str], output: Path) -> int:
    """Run `extremis COMMAND` into OUTPUT.out and OUTPUT.err; return its exit status."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for descriptor, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    if command[0] == "torchrun":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        sys.exit(subprocess.run([*launcher, "-m", "extremis", *command[1:]], check=False).returncode)
    sys.argv = ["extremis", *command]
    runpy.run_module("extremis", run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
