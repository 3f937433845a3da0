"""Print what `pip install .[EXTRAS]` would need beside the code, one requirement a line: requirements.py EXTRA,EXTRA"""

import configparser
import sys
from collections.abc import Iterator

setup = configparser.ConfigParser()
setup.read("setup.cfg")


def lines(text: str) -> Iterator[str]:
    """Yield requirements; those of another extra of ours in the place of its name."""
    for line in filter(None, text.split("\n")):
        if line.startswith(f"{setup['metadata']['name']}["):
            yield from of_extras(line.partition("[")[2].rstrip("]"))
        else:
            yield line


def of_extras(names: str) -> Iterator[str]:
    """Yield the requirements of `names`, which commas part."""
    for name in names.split(","):
        yield from lines(setup["options.extras_require"][name])


print(*dict.fromkeys([*lines(setup["options"]["install_requires"]), *of_extras(sys.argv[1])]), sep="\n")
