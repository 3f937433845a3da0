"""Write images/locked.txt, what images install: versions of constraints.txt, each file's SHA-256. lock.py UV"""

import configparser
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
HEAD = "# Written by `make lock` from setup.cfg and constraints.txt. Before each package: the extras that need it.\n"
SETUP = configparser.ConfigParser()
SETUP.read(FOLDER.parent / "setup.cfg")
# "build" is what makes the wheel; the other extras are for those who work on the code.
EXTRAS = ["build", *(name for name in SETUP["options.extras_require"] if name not in ("docs", "test", "bench", "dev"))]


def requirements(extra: str) -> Iterator[str]:
    """Yield what `pip install .[extra]` needs beside the code, with the requirements of other extras of ours."""
    if extra == "build":
        yield from re.findall(r'^requires = \["(.*)"\]', (FOLDER.parent / "pyproject.toml").read_text(), re.MULTILINE)
        return
    texts = [SETUP["options"]["install_requires"], SETUP["options.extras_require"][extra]]
    for line in filter(None, "\n".join(texts).split("\n")):
        if line.startswith(f"{SETUP['metadata']['name']}["):
            for name in line.partition("[")[2].rstrip("]").split(","):
                yield from requirements(name)
        else:
            yield line


def lock(uv: str, extra: str) -> list[str]:
    """Return an extra's packages with versions and digests, for each Python and machine, as uv finds them."""
    options = ["--universal", "--python-version=3.10", "--generate-hashes", "--no-annotate", "--no-header"]
    command = [uv, "pip", "compile", "-q", *options, "-c", str(FOLDER.parent / "constraints.txt"), "-"]
    text = "\n".join(requirements(extra))
    found = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return re.split(r"\n(?=\S)", found.strip())


def main() -> None:
    """Lock each extra that an image may have; one entry for each package."""
    needed = defaultdict(list)
    for extra in EXTRAS:
        for package in lock(sys.argv[1], extra):
            needed[package].append(extra)
    entries = [f"\n# {' '.join(extras)}\n{package}\n" for package, extras in sorted(needed.items())]
    (FOLDER / "locked.txt").write_text(HEAD + "".join(entries))


if __name__ == "__main__":
    main()
