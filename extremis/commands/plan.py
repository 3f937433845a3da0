"""`extremis plan`."""

import shlex
from dataclasses import replace
from os import fspath
from typing import Annotated, Any, Literal

from extremis.command import Option, Progress, changes, command
from extremis.commands.shared import Place, Positive, Recipe, Settings, Size, with_settings
from extremis.console import say


def _number(text: str) -> int:
    """Parse a whole number, which may be written as 370e6."""
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
    engine: Literal["flink", "spark"] | None = None,
    memory: Size = "8GiB",
    progress: Progress = True,
) -> dict[str, Any]:
    """Estimate the bytes of every table and the memory of every step before a run starts.

    Settings that a recipe takes from the data are computed from the given numbers.

    Options:
        queries: Number of queries, N. Default: the number in DATA.
        labels: Number of labels, L. Default: the number in DATA.
        data: A sharded sample of the data, from which averages per row are computed.
        tokens: Tokens per query, on average.
        label_tokens: Tokens per label, on average.
        labels_per_query: Labels per query, on average.
        key_bytes: Characters of a key, on average.
        text_bytes: Characters of a label, on average.
        vocabulary: Number of tokens in the vocabulary.
        dimension: Dimension of embeddings, D. Default: as in the recipe.
        width: Number of negatives per row in tables, K. Default: as in the recipe.
        epochs: Number of epochs. Default: as in the recipe.
        ranks: Number of trainer processes.
        workers: Number of pipeline workers.
        engine: Engine of the cluster that runs the pipelines. Default: none.
        memory: Memory of each process.

    Examples:
      extremis plan --queries 370e6 --labels 120e6 --tokens 10 --dimension 64 --memory 64GiB
      extremis plan --data data/ --queries 370e6 --labels 120e6 --json
      extremis plan --queries 370e6 --labels 120e6 --tokens 10 --engine flink --workers 64
    """
    options = locals()
    from extremis import planning as planning
    from trainer.config.load import load_recipe

    recipe, data = fspath(recipe), None if data is None else fspath(data)
    keys = {"encoder__dimension": dimension, "negatives__width": width, "train__epochs": epochs}
    overrides = with_settings(changes(set), **keys)
    rows, columns = (None if count is None else int(count) for count in (queries, labels))
    averages = {name: options[name] for name in planning.WORKLOAD_OPTIONS}
    workload = planning.workload(data, rows, columns, load_recipe(recipe, overrides), memory, averages)
    resolved = planning.resolve_for(workload, recipe, overrides, data)
    for line in resolved.reasons:
        say(line)
    workload = replace(workload, recipe=planning.with_streams_for(ranks, resolved.recipe, say))
    report = planning.plan(workload, engine)
    report["settings"] = resolved.settings
    planning.show(report)
    given = [word for override in overrides for word in ("--set", override)]
    say(f"next: {shlex.join(['extremis', 'run', recipe, data or 'DATA', 'RUN', *given])}")
    return report
