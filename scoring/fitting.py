"""Fit, carry over, publish and open a fusion."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from schemas import PAD
from schemas.errors import InputError, TableError, option
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest, is_published, read_shard, write_file
from schemas.owners import building
from schemas.ragged import Ragged, pad_columns
from schemas.shard_files.parquet import filters_of, list_column
from schemas.storage import join
from schemas.table import Table
from scoring.fusion import FILES as FUSION_FILES
from scoring.fusion import (
    Fusion,
    FusionTree,
    FusionWeights,
    Reranker,
    Scorers,
    ShortlistScores,
    fusion_file,
    parse_fusion,
)
from scoring.linear import BUDGET as RANKER_BUDGET
from scoring.linear import FILE, TRAINED_FILE, LinearRanker
from scoring.memory import BUDGET, FACTS, TUNED, Memory, describe_memory
from scoring.options import FitOptions
from trainer.checkpoints import Checkpoint, best_step
from trainer.device import open_device
from trainer.evaluation.evaluate import HOLDOUT, label_statistics, open_held_out
from trainer.evaluation.metrics import Metrics
from trainer.evaluation.ranking import LabelRows, embed_label_texts, filtered_top_k
from trainer.group import ALONE, Group
from trainer.inputs import Inputs, columns_of, scored_columns
from trainer.methods.recipe import Recipe
from trainer.model import Model, find_earlier, load_model
from trainer.modules import open_named

KIND = "fusion"


class RunFusion(NamedTuple):
    fusion: Fusion
    table: Table
    shortlist: int  # number of the classifier's best labels that are reranked

    def memory(self, split: str | None = None) -> Memory | None:
        """Read the memory, if there is one; for `split`, only the points that may vote. Raises TableError.

        If `split` is the held-out rows, held-out points are excluded, because each row would find itself.
        """
        return Memory.read(self.table, trained_only=split == HOLDOUT)

    def ranker(self, split: str | None = None) -> LinearRanker | None:
        """Read the linear ranker, if there is one; for `split`, a ranker that was not fitted to `split`."""
        unseen = LinearRanker.read(self.table, TRAINED_FILE) if split == HOLDOUT else None
        return unseen or LinearRanker.read(self.table)


def publish_fusion(
    data: str,
    run: str,
    checkpoint: Checkpoint,
    fusion: Fusion,
    facts: dict[str, Any],
    memory: Memory | None = None,
    linear: Mapping[str, LinearRanker] | None = None,
) -> Manifest:
    """Publish a fusion, a memory, and rankers by file name; replaces an earlier fusion."""
    url = RunLayout(run).fusion(checkpoint.step)
    with building(url, "fitted") as build:
        return build.publish(
            Manifest(
                kind=KIND,
                shards=(
                    write_file(build.url, *fusion_file(fusion)),
                    *(memory.write(build.url) if memory else ()),
                    *(ranker.write(build.url, name) for name, ranker in (linear or {}).items()),
                ),
                parents={"data": Table.open(data, "data").digest, "checkpoint": checkpoint.table.digest},
                parameters=facts,
            )
        )


def open_fused(data: str, run: str, checkpoint: Checkpoint, model: Model, split: str, group: Group = ALONE) -> Reranker:
    """Open the fusion for `checkpoint`, for the rank's labels and the queries of `split`.

    Raises InputError if there is no fusion. Raises TableError.
    """
    opened = group.decide(lambda: open_fusion(data, run, checkpoint))
    layout = DataLayout(data)
    texts = embed_label_texts(model, layout) if opened.fusion.reads_texts else None
    frequency = label_statistics(layout).frequency
    memory = opened.memory(split)
    scorers = Scorers(texts, memory and memory.to(model.device), opened.ranker(split))
    return Reranker(opened.fusion, scorers, frequency, opened.shortlist)


def scores_of(run: str, step: int) -> Literal["fused", "classifier"]:
    """Return the name of a checkpoint's default scores: "fused" if the checkpoint has a fusion."""
    return "fused" if is_published(RunLayout(run).fusion(step)) else "classifier"


def open_fusion(data: str, run: str, checkpoint: Checkpoint) -> RunFusion:
    """Open the fusion that `extremis fuse` fitted to `checkpoint`. Raises InputError without a fusion; TableError."""
    url, step = RunLayout(run).fusion(checkpoint.step), checkpoint.step
    if not is_published(url):
        raise InputError(f"{run}: step {step:,} has no fusion. Fit a fusion with `extremis fuse {data} {run}`.")
    table = Table.open(url, KIND)
    if table.parents["checkpoint"] != checkpoint.table.digest:
        raise InputError(
            f"{url}: the checkpoint of step {step:,} has changed since this fusion was fitted. Fit the fusion again "
            f"with `extremis fuse {data} {run}`."
        )
    file = next((shard for shard in table.shards if shard.path in FUSION_FILES), None)
    if file is None:
        raise TableError(f"{url}: contains none of {', '.join(FUSION_FILES)}. Fit the fusion again.")
    fusion = parse_fusion(read_shard(url, file, "Fit the fusion again."), join(url, file.path))
    return RunFusion(fusion, table, int(table.parameters["shortlist"]))


DEFAULTS = FitOptions()


def _open_validation(data: str, run: str, options: FitOptions) -> tuple[Recipe, Model, Checkpoint, str, list[pa.Table]]:
    """Load the model as `load_model` does, and open the split to fit on, as one table per row group."""
    layout = DataLayout(data)
    step = best_step(RunLayout(run)) if options.step is None else options.step  # not the step of an earlier fusion
    recipe, model, checkpoint = load_model(layout, RunLayout(run), step, device=open_device(options.device))
    split, table, share = open_held_out(layout, options.split, recipe.data, "A fusion")
    rows = list(share.batches(table, scored_columns(table, model.columns), options.queries))
    return recipe, model, checkpoint, split, rows


REFIT_HOLDOUT = 0.03  # if a larger fraction of rows is held out, the ranker is fitted again with these rows


def fit_ranker(
    data: str, recipe: Recipe, budget: int = RANKER_BUDGET, seconds: float = math.inf, held_out: bool = False
) -> LinearRanker | None:
    """Fit the linear ranker to the training rows of `recipe` with `LinearRanker.of`; None for a mix or without rows.

    Raises TableError, StorageError.
    """
    if recipe.data.mix:
        return None
    columns = columns_of(recipe.encoder.inputs)
    return LinearRanker.of(DataLayout(data), recipe.data, columns, budget, held_out, seconds)


def fit_weights(
    data: str,
    run: str,
    options: FitOptions = DEFAULTS,
    budget: int = BUDGET,
    ranker_budget: int = RANKER_BUDGET,
    ranker: LinearRanker | None = None,
    seconds: float = math.inf,
) -> Manifest:
    """Fit the weights for labels' texts, a memory and a linear ranker for a checkpoint.

    The memory takes at most `budget` bytes, and is stored if its weight is above 0: then with the held-out points, too,
    although the weights were fitted without them. Without a `ranker`, one is fitted to training rows of at most
    `ranker_budget` bytes (0: no rows), in at most `seconds`. It is stored if its weight is above 0, and fitted again
    with the held-out rows if there are many. An existing fusion is replaced. Raises InputError if the split or device
    does not exist. Raises TableError, StorageError.
    """
    layout = DataLayout(data)
    recipe, model, checkpoint, split, groups = _open_validation(data, run, options)
    whole = None if recipe.data.mix else Memory.build(model, layout, recipe.data, budget)
    memory, embedded = None, [torch.zeros(0, model.width)]
    if whole is not None:
        for rows in groups:
            missing = 3 * TUNED - sum(map(len, embedded))
            embedded += [model.embed_table(rows.slice(0, missing)).float().cpu()] if missing > 0 else []
        memory = whole.first(whole.trained).indexed(torch.cat(embedded), budget)
    readable = set(model.columns) <= {*Table.open(layout.labels, "labels").columns}
    texts = embed_label_texts(model, layout) if model.head.has_rows and readable else None
    ranker = ranker or fit_ranker(data, recipe, ranker_budget, seconds)
    scorers = Scorers(texts, memory and memory.to(model.device), ranker)
    scored, relevant = score_shortlists(model, scorers, groups, options.shortlist)
    weights = FusionWeights.fit(scored, relevant)
    rankings = {
        "vectors": scored.scores,
        **({"linear ranker": scored.linear} if ranker else {}),
        "fused": weights.fuse(scored),
    }
    metrics = {}
    for name, scores in rankings.items():
        order = np.argsort(-np.where(scored.ids == PAD, -np.inf, scores), axis=1, kind="stable")
        ranked = Metrics((1, 5))
        ranked.update(np.take_along_axis(scored.ids, order, 1), relevant)
        metrics[name] = {metric: round(value, 2) for metric, value in ranked.result().items() if metric[:2] == "P@"}
    memory = memory.extended(whole) if memory and whole and weights.votes else None
    facts = {
        "split": split,
        "queries": relevant.rows,
        "shortlist": options.shortlist,
        "texts": weights.texts,
        "votes": weights.votes,
        "linear": weights.linear,
        "unit": weights.unit,
        "metrics": metrics,
        FACTS: memory.facts if memory else None,
        "memory_bytes": memory.bytes if memory else 0,
    }
    kept = {FILE: ranker} if ranker and weights.linear else {}
    if kept and recipe.data.holdout > REFIT_HOLDOUT:
        all_rows = fit_ranker(data, recipe, ranker_budget, seconds, held_out=True)
        kept = {FILE: all_rows or kept[FILE], TRAINED_FILE: kept[FILE]}
    return publish_fusion(data, run, checkpoint, weights, facts, memory, kept)


def carry_fusion(data: str, run: str, earlier: str, device: str = "auto") -> Manifest | None:
    """Copy the fusion of the run `earlier` that `run` continues: weights and linear ranker, but with a new memory.

    Nothing is fitted; the ranker is the one without the rows that `earlier` held out, and the memory's index is tuned
    on the memory's own points. Returns None if `earlier` has no fusion, or if `run` already has a fusion. Raises the
    same errors as `fit_weights`.
    """
    layout = DataLayout(data)
    _, before, _ = find_earlier(layout, RunLayout(earlier), RunLayout(earlier).scored_step())
    if not is_published(RunLayout(earlier).fusion(before.step)):
        return None
    step = best_step(RunLayout(run))
    recipe, model, checkpoint = load_model(layout, RunLayout(run), step, device=open_device(device))
    if is_published(RunLayout(run).fusion(checkpoint.step)):
        return None
    fusion, table, _ = carried = open_fusion(data, earlier, before)
    memory = None
    if isinstance(fusion, FusionWeights) and fusion.votes and not recipe.data.mix:
        memory = Memory.build(model, layout, recipe.data)
        memory = memory.indexed(torch.from_numpy(memory.vectors[: 3 * TUNED].astype(np.float32)))
    ranker = carried.ranker(HOLDOUT)  # no row that `run` holds out has trained this ranker
    rankers = {FILE: ranker} if ranker else {}
    measured = table.parameters.get("carried_from", earlier)  # the run that fitted the fusion
    facts = {**table.parameters, "carried_from": measured, FACTS: memory.facts if memory else None}
    facts["memory_bytes"] = memory.bytes if memory else 0
    return publish_fusion(data, run, checkpoint, fusion, facts, memory, rankers)


def describe_weights(facts: dict[str, Any]) -> str:
    """Describe the fitted weights, and the size and speed of the memory."""
    memory = f" ({describe_memory(facts[FACTS])})" if facts["votes"] else ""
    return (
        f"fitted on {facts['queries']:,} queries of {facts['split']}: {facts['texts']:.2f} x labels' texts + "
        f"{facts['votes']:.2f} x votes of training points{memory} + {facts['linear']:.2f} x linear ranker; P@1 / P@5 "
        "on these queries: "
        + ", ".join(f"{name} {of['P@1']:.1f} / {of['P@5']:.1f}" for name, of in facts["metrics"].items())
    )


def score_shortlists(
    model: Model, scorers: Scorers, groups: Iterable[pa.Table], shortlist: int, with_relevant: bool = False
) -> tuple[ShortlistScores, Ragged]:
    """Return the scores [B, S] of all scorers on the queries' shortlists, and the queries' labels.

    `with_relevant`: also score a query's own labels that are not in the shortlist, unless a filter removes the labels.
    """
    labels, parts, relevant = LabelRows(model.head.vectors, model.head.start), [], []
    for rows in groups:
        x, filters, positives = model.embed_table(rows), filters_of(rows), list_column(rows, "label_ids")
        scores, ids = filtered_top_k(x, labels, shortlist, filters)
        if with_relevant:
            missing = positives.padded()
            missing = np.where(Ragged.from_matrix(ids).contains(missing) | filters.contains(missing), PAD, missing)
            scores = np.concatenate([scores, labels.score(x, missing)], axis=1)
            ids = np.concatenate([ids, missing], axis=1)
        parts.append(scorers.score(x, Inputs.of(rows), labels, (scores, ids), filters))
        relevant.append(positives)
    width = max(part.ids.shape[1] for part in parts)
    columns = zip(zip(*parts, strict=True), (PAD, 0, 0, 0, 0), strict=True)  # ids, and scores of each kind
    joined = (np.concatenate([pad_columns(part, width, pad) for part in column]) for column, pad in columns)
    return ShortlistScores(*joined), Ragged.join(relevant)


def fit_score(data: str, run: str, by: str, options: FitOptions = DEFAULTS) -> Manifest:
    """Fit the score `by`, "module:name", for a checkpoint: a function (scored, frequency, relevant) -> Fusion.

    It gets the scores of vectors and texts for the `shortlist` best labels of each query and the query's own labels,
    the `frequency` [B, S] of the labels, and which labels are `relevant` [B, S] bool; 0 and False where `scored.ids` is
    padded. The fusion's class is one of `scoring.fusion`, or in the same module. An existing fusion is replaced. Raises
    InputError if the module, the split or the device does not exist, or if there are no texts or no classifier. Raises
    TableError, StorageError.
    """
    layout, named = DataLayout(data), open_named(by, where=option("by", by))
    _, model, checkpoint, split, groups = _open_validation(data, run, options)
    scorers = Scorers(embed_label_texts(model, layout))
    scored, positives = score_shortlists(model, scorers, groups, options.shortlist, with_relevant=True)
    listed, relevant = scored.ids != PAD, positives.contains(scored.ids)
    frequency = np.where(listed, label_statistics(layout).frequency[scored.ids], 0)
    fusion = named.object(scored, frequency, relevant)
    if not isinstance(fusion, FusionWeights | FusionTree):
        own = f"{by.partition(':')[0]}:{type(fusion).__name__}"
        if not isinstance(fusion, Fusion) or open_named(own).object is not type(fusion):
            raise InputError(f"{option('by', by)} returned {type(fusion)}, expected a Fusion of a class in its module.")
    facts = {
        "split": split,
        "queries": positives.rows,
        "pairs": int(listed.sum()),
        "positive_pairs": int(relevant.sum()),
        "shortlist": options.shortlist,
        "by": by,
        "sha256": named.sha256,
    }
    return publish_fusion(data, run, checkpoint, fusion, facts)
