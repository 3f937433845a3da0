"""The build writes the commit into the wheel and into the source archive; setup.cfg says all the rest."""

import os
import re
import sys
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

sys.path.insert(0, str(Path(__file__).parent))  # an isolated build does not have it

from schemas import commit


def write_commit(root: str) -> None:
    """Write the module that `schemas.commit` reads; where git cannot tell, as in an image, EXTREMIS_COMMIT does."""
    told = re.sub(r"^([0-9a-f]{12})[0-9a-f]*", r"\1", os.environ.get("EXTREMIS_COMMIT") or commit())
    Path(root, "schemas", "_commit.py").write_text(f"COMMIT = {told!r}\n")


class BuildPackages(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a checkout asks git
            write_commit(self.build_lib)


class BuildSource(sdist):
    def make_release_tree(self, base_dir: str, files: Any) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


# A page of an index has neither our files nor our drawings: links to them are their words alone.
readme = re.sub(r"!?\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", Path(__file__).with_name("README.md").read_text())

setup(
    long_description=readme,
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildPackages, "sdist": BuildSource},
)
