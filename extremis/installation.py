"""Checks that `extremis` imports its own packages, and finds the extra that installs a missing package."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

OWN_PACKAGES = ("schemas", "search", "trainer", "pipelines", "scoring", "recipes")
# Modules that only extras install, by the smallest extra that installs the module.
_EXTRAS = {
    "pipelines": ("apache_beam", "faiss", "huggingface_hub", "orjson", "prometheus_client", "tokenizers"),
    "trainer": ("numba", "safetensors", "scipy", "sklearn", "torch", "transformers"),
    "report": ("jinja2", "plotly"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}


def require_own_packages() -> None:
    """Check the packages. If a package is not ours, print one message, and end the command with status 2.

    In a program that is not one of our commands, raise ImportError: the program may continue without Extremis.
    """
    try:
        check_own_packages()
    except ImportError as error:
        program, words = sys.argv[0], sys.orig_argv
        is_ours = Path(program).stem in ("extremis", "extremis-worker")
        if program == "-m":  # Python has not found the module yet
            is_ours = words[len(words) - len(sys.argv)].removeprefix("-m").partition(".")[0] == "extremis"
        if not is_ours:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def check_own_packages() -> None:
    """Check that each package comes from this folder, not from another distribution or folder with the same name.

    A folder without `__init__.py` is harmless. Raises ImportError that names both files and a remedy.
    """
    root = Path(__file__).resolve().parents[1]
    for name in OWN_PACKAGES:
        spec, ours = find_spec(name), root / name / "__init__.py"
        places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
        files = [Path(place).resolve() for place in places if place not in ("", "namespace")]
        if ours in files or ours.parent in files:
            continue
        if spec is None or spec.origin is None:  # no module, or only a namespace folder
            problem, remedy = f"{ours} is not on Python's path", _remedy(None)
        else:
            problem = f"{files[0]} shadows {ours}"
            remedy = _remedy(files[0].parents[0 if spec.submodule_search_locations is None else 1])
        raise ImportError(f"Extremis needs its own package `{name}`, but {problem}. {remedy}", name=name)


def _remedy(folder: Path | None) -> str:
    """Describe what to do about a module in `folder` that has the name of an Extremis module."""
    named = {Path(place).resolve() for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place}
    if folder in named:
        return f"Rename it, or remove {folder} from PYTHONPATH."
    if folder in (Path.cwd(), Path(sys.path[0]).resolve()):
        return (
            "Rename it, start from another folder, or set PYTHONSAFEPATH=1 (Python 3.11 and later), which keeps "
            f"{folder} off the path."
        )
    return "Install Extremis into an environment of its own (python -m venv)."


def extra_of(module: str) -> str | None:
    """Return the extra that installs `module` ("torch" or "torch.nn"); None if no extra installs it."""
    top = module.partition(".")[0]
    return next((extra for extra, modules in _EXTRAS.items() if top in modules), None)
