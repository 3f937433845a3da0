"""Check of the installation: the packages that `extremis` imports are its own, and what an absent one is brought by."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

OURS = ("schemas", "search", "trainer", "pipelines", "recipes")
# Modules that only extras bring, by the extra that has the least beside.
_EXTRAS = {
    "pipelines": ("apache_beam", "faiss", "huggingface_hub", "orjson", "tokenizers"),
    "trainer": ("numba", "prometheus_client", "safetensors", "scipy", "tensorboard", "torch", "transformers"),
    "report": ("jinja2", "plotly"),
    "fusion": ("sklearn",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "dask": ("dask", "distributed"),
}


def require_ours(names: Sequence[str] = OURS) -> None:
    """Check that each package is the one beside this one, not another distribution's or folder's of the same name.

    Raises ImportError, which names the file that shadows, and the one that is shadowed.
    """
    root = Path(__file__).resolve().parents[1]
    for name in names:
        spec, ours = find_spec(name), root / name / "__init__.py"
        places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
        files = [Path(place).resolve() for place in places if place not in ("", "namespace")]
        if ours in files or ours.parent in files:
            continue
        problem = f"{files[0]} shadows {ours}" if files else f"{ours} is not on the path"
        raise ImportError(
            f"Extremis needs its own package `{name}`, but {problem}. Install Extremis into an environment of its own "
            "(python -m venv), or take the other one off PYTHONPATH and out of the current folder.",
            name=name,
        )


def extra_of(module: str) -> str | None:
    """Return the extra that brings `module` ("torch", "torch.nn"); None: none of ours."""
    top = module.partition(".")[0]
    return next((extra for extra, modules in _EXTRAS.items() if top in modules), None)
