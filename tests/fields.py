"""Writes extremis/fields.pyi, the keyword arguments that functions take from the models of the pipelines.

python -m tests.fields > extremis/fields.pyi
"""

import sys
from os import PathLike
from types import NoneType
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from extremis.function import facts_of, unwrap
from extremis.training import TrainOptions
from pipelines.options import ArrayOptions, ClusterOptions, EmbedTextsOptions, MergeOptions, ShardOptions, TeachOptions
from schemas.options import Options
from scoring.options import DecisionOptions, EvaluateOptions, ExportOptions, FitOptions, TupleOptions

MODELS = (
    *(ArrayOptions, ClusterOptions, EmbedTextsOptions, MergeOptions, ShardOptions, TeachOptions, TrainOptions),
    *(DecisionOptions, EvaluateOptions, ExportOptions, FitOptions, TupleOptions),
)
HEAD = '''"""Keyword arguments that functions take from models of the pipelines, for editors."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict

from scoring.decision import Decision
'''


def written(field: FieldInfo) -> str:
    """Return the type that a caller may give."""
    kind, shown, _ = facts_of(field)
    if get_origin(kind) is Literal:
        name = f"Literal[{', '.join(map(repr, get_args(kind)))}]"
    elif get_origin(kind) is tuple:
        name = f"Sequence[{unwrap(get_args(kind)[0])[0].__name__}]"
    else:
        name = kind.__name__ if isinstance(kind, type) else str(kind).replace("collections.abc.", "")
    if shown.place:
        name = f"str | {PathLike.__name__}[str]"
    name += " | Mapping[str, object] | Decision" if Options in get_args(kind) else ""
    name += {"SIZE": " | str", "NAME=NAME,...": " | Mapping[str, str]"}.get(shown.metavar or "", "")
    return f"{name} | None" if NoneType in get_args(field.annotation) else name


def stub(model: type[Options]) -> str:
    base = next((base for base in model.__bases__ if base in MODELS), Options)
    fields = {name: field for name, field in model.model_fields.items() if name not in base.model_fields}
    lines = [f"    {field.alias or name}: {written(field)}" for name, field in fields.items() if field.description]
    return f"class {_name(model)}({_name(base)}, total=False):\n" + "\n".join(lines)


def _name(model: type[Options]) -> str:
    return "TypedDict" if model is Options else f"{model.__name__.removesuffix('Options')}Fields"


def page() -> str:
    return "\n\n".join([HEAD.rstrip(), *map(stub, MODELS)]).replace("'", '"') + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
