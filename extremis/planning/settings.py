"""Options that a recipe leaves to the data, for data that is not there yet: as the planned numbers would decide."""

from collections.abc import Iterable
from dataclasses import replace

from extremis.planning.workload import Workload
from schemas.layout import DataLayout
from trainer.config.load import auto_keys, read_recipe
from trainer.methods.rules import Facts
from trainer.settings.facts import HEAPS, measure
from trainer.settings.resolve import Resolved, derive
from trainer.stream.sources import ALL_ROWS

_NGRAMS = 4  # times (tokens of all texts) ** HEAPS: 1.8 to 9 on texts of six data sets; buckets are rounded up anyway


def resolve_for(workload: Workload, source: str, overrides: Iterable[str], data: str | None) -> Resolved:
    """Derive what the recipe `source` leaves to the data from the workload's numbers; `data`: a sample of it.

    Raises InputError: as `resolve`; TableError.
    """
    body = read_recipe(source, overrides)
    if not auto_keys(body):
        return Resolved(workload.recipe)
    return derive(body, facts_of(workload, data), source)


def facts_of(workload: Workload, data: str | None) -> Facts:
    """Return the figures of the planned data: from its averages, or from `data` scaled up. Raises TableError."""
    label_texts = workload.sources.get("labels", 0)
    queries = workload.trained_queries
    if data is None:
        tokens = queries * workload.tokens
        pairs = round(queries * workload.labels_per_query)
        ngrams = round(_NGRAMS * tokens**HEAPS)
        return Facts(queries, workload.labels, pairs, label_texts, ngrams, workload.tokens)
    sample = measure(DataLayout(data), "train", ALL_ROWS, bool(label_texts))
    times = queries / sample.queries
    return replace(
        sample,
        queries=queries,
        labels=workload.labels,
        pairs=round(sample.pairs * times),
        label_texts=label_texts,
        ngrams=round(sample.ngrams * times**HEAPS),
    )
