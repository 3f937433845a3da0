"""What a run reads and finds negatives with, as its recipe asks, and what cannot be."""

from schemas.errors import InputError
from trainer.config import Recipe
from trainer.group import SILENCE_SECONDS, Group
from trainer.heads.classifier import Classifier
from trainer.model import Model
from trainer.negatives.planner import Planner
from trainer.negatives.sources import Sources
from trainer.stream import JoinedStream, Reading, Source


def open_stream(
    recipe: Recipe, sources: list[Source], labels: int, group: Group, plan: Planner | None = None
) -> JoinedStream:
    """The rank's stream over `sources`; with `plan` its batches come with candidates."""
    order, reading = recipe.order, recipe.storage
    return JoinedStream(
        sources,
        labels,
        inputs=recipe.encoder.inputs,
        batch=order.batch,
        streams=order.streams,
        window_groups=order.window_groups,
        clusters=order.clusters,
        seed=recipe.train.seed,
        threads=order.threads,
        tail=order.tail,
        rank=group.rank,
        ranks=group.ranks,
        plan=plan,
        damaged=reading.damaged,
        reading=Reading(
            verify=reading.verify,
            threads=reading.fetch_threads,
            cache=reading.cache,
            cache_bytes=reading.cache_bytes,
        ),
    )


def open_found(recipe: Recipe, model: Model, group: Group) -> Sources | None:
    """The sources of hard negatives beside tables and the trainer's own index; None where there are none.

    Raises InputError where they cannot be on several ranks.
    """
    classifier = model.classifier
    if not isinstance(classifier, Classifier):
        return None
    count, dimension = classifier.vectors.shape
    found = Sources.of(recipe.negatives, classifier.read, count, dimension, recipe.train.seed)
    if found is not None and found.stateful and group.ranks > 1:
        raise InputError(
            f"negatives.lsh on {group.ranks} ranks: its state is saved by one rank. "
            "Train on one rank, or take negatives from tables or the trainer's own index (negatives.hard)."
        )
    return found


def require_streamable(recipe: Recipe, sources: list[Source], data: str, group: Group) -> None:
    """Raises InputError for tables that cannot be streamed, and waits that ranks would take for a loss."""
    waits = recipe.refresh.wait_seconds
    if group.ranks > 1 and waits >= SILENCE_SECONDS:
        raise InputError(
            f"refresh.wait_seconds = {waits:g}: ranks take one that is silent for {SILENCE_SECONDS:g} seconds for "
            "lost. Set it lower."
        )
    if None in {source.table.manifest.row_group_rows for source in sources}:
        raise InputError(f"{data}: a training table without row groups cannot be streamed. Shard it again.")


def require_same_recipe(started: Recipe, given: Recipe, run: str) -> None:
    """Refuse to go on with another recipe than the run started with. Raises InputError that names what differs."""
    before, now = started.model_dump(), given.model_dump()
    differing = [
        f"{section}.{key} was {before[section].get(key)!r}, now {value!r}"
        for section, values in now.items()
        if isinstance(values, dict) and section != "storage"  # how it is read, not what
        for key, value in values.items()
        if value != before[section].get(key) and (section, key) != ("classifier", "storage")  # where it is kept
    ]
    if differing:
        raise InputError(
            f"{run}: this run was started with another recipe: {'; '.join(differing)}. "
            "Resume with the recipe and --set that it was started with, or choose another RUN."
        )
