"""`extremis plan`."""

from dataclasses import replace
from os import fspath
from typing import Annotated, Any, Literal

from extremis.command import Option, Progress, changes, command
from extremis.commands.shared import Place, Positive, Recipe, Settings, Size, with_settings
from extremis.console import say


def _number(text: str) -> int:
    """Read a whole number, also written as 370e6."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value < 1 or value != int(value) or value > 1e15:
        raise ValueError("a whole number of at least 1, such as 370e6")
    return int(value)


_Number = Annotated[float, Option(metavar="NUMBER", parse=_number)]


@command()
def plan(
    *,
    queries: _Number | None = None,
    labels: _Number | None = None,
    data: Place | None = None,
    tokens: float = 32,
    label_tokens: float = 8,
    labels_per_query: float = 5,
    key_bytes: float = 12,
    text_bytes: float = 40,
    vocabulary: Annotated[int, Option(ge=2)] = 30_000,
    recipe: Recipe = "astra",
    set: Settings = (),
    dimension: Positive | None = None,
    width: Positive | None = None,
    epochs: Positive | None = None,
    ranks: Positive = 1,
    workers: Positive = 1,
    engine: Literal["flink", "spark", "dataflow"] | None = None,
    memory: Size = "8GiB",
    progress: Progress = True,
) -> dict[str, Any]:
    """Say what a run will take before it is started: bytes of every table, memory and time of every step.

    Times are of cores like those that the formulas' figures were measured on.
    What a recipe leaves to the data is set as the numbers here would decide.

    Options:
        queries: N. Default: as many as DATA has.
        labels: L. Default: as many as DATA has.
        data: A sharded sample of the data; its averages stand for all rows.
        tokens: Tokens per query, on average.
        label_tokens: Tokens per label, on average.
        labels_per_query: Labels per query, on average.
        key_bytes: Characters of a key, on average.
        text_bytes: Characters of a label, on average.
        vocabulary: Number of tokens.
        dimension: D. Default: the recipe's.
        width: K of the negative tables. Default: the recipe's.
        epochs: Default: the recipe's.
        ranks: Trainer processes.
        workers: Pipeline workers.
        engine: Cluster of the pipelines. Default: none.
        memory: Memory of each process.

    Examples:
      extremis plan --queries 370e6 --labels 120e6 --tokens 10 --dimension 64 --memory 64GiB
      extremis plan --data data/ --queries 370e6 --labels 120e6 --json
      extremis plan --queries 370e6 --labels 120e6 --tokens 10 --engine flink --workers 64
    """
    from extremis.planning import plan as planning
    from trainer.config import load_recipe

    source, data = fspath(recipe), None if data is None else fspath(data)
    keys = {"encoder__dimension": dimension, "negatives__width": width, "train__epochs": epochs}
    overrides = with_settings(changes(set), **keys)
    rows, columns = (None if count is None else int(count) for count in (queries, labels))
    averages = {
        "tokens": tokens,
        "label_tokens": label_tokens,
        "labels_per_query": labels_per_query,
        "key_bytes": key_bytes,
        "text_bytes": text_bytes,
        "vocabulary": vocabulary,
        "ranks": ranks,
        "workers": workers,
    }
    workload = planning.workload(data, rows, columns, load_recipe(source, overrides), memory, averages)
    resolved = planning.resolve_for(workload, source, overrides, data)
    for line in resolved.reasons:
        say(line)
    report = planning.plan(replace(workload, recipe=resolved.recipe), data, engine)
    report["settings"] = {key: setting.value for key, setting in resolved.settings.items()}
    planning.show(report)
    say(f"next: extremis run {source} {data or 'DATA'} RUN")
    return report
