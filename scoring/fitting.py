"""Fit, carry over, publish and open a fusion."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
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
    OWN_SCORE,
    Fusion,
    FusionTree,
    FusionTrees,
    FusionWeights,
    Reranker,
    Scorers,
    ShortlistScores,
    fusion_file,
    parse_fusion,
)
from scoring.linear import FILE, TRAINED_FILE, LinearRanker
from scoring.memory import BUDGET, FACTS, TUNED, Memory, describe_memory
from scoring.names import TOKENS, Names
from scoring.neighbours import Neighbours
from scoring.options import FitOptions
from scoring.words import BUDGET as RANKER_BUDGET
from scoring.words import hash_texts
from trainer.checkpoints import Checkpoint, best_step
from trainer.device import open_device
from trainer.evaluation.evaluate import HOLDOUT, label_statistics, open_held_out
from trainer.evaluation.metrics import Metrics
from trainer.evaluation.ranking import LabelRows, embed_label_texts, filtered_top_k
from trainer.group import ALONE, Group
from trainer.inputs import Inputs, columns_of, open_queries, scored_columns
from trainer.methods.recipe import Recipe
from trainer.methods.sections import Data
from trainer.model import Model, find_earlier, load_model
from trainer.modules import open_named

KIND = "fusion"


class RunFusion(NamedTuple):
    fusion: Fusion
    table: Table
    shortlist: int  # number of the classifier's best labels that are reranked

    def fits(self, split: str | None) -> bool:
        """Whether the fusion was fitted to rows of `split`."""
        return bool(self.table.parameters["split"] == split)

    def left_out(self, split: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return the hashes of the texts of `split` and the ids of the labels that judging the fit left out."""
        known = self.table.parameters if self.fits(split) else {}
        return known.get("repeated", ()), known.get("given_away", ())

    def memory(self, split: str | None = None) -> Memory | None:
        """Read the memory, if there is one; for `split`, only the points that may vote. Raises TableError.

        If `split` is the held-out rows, held-out points are excluded, because each row would find itself.
        """
        return Memory.read(self.table, trained_only=split == HOLDOUT)

    def ranker(self, split: str | None = None) -> LinearRanker | None:
        """Read the linear ranker, if there is one; for `split`, a ranker that was not fitted to `split`."""
        unseen = LinearRanker.read(self.table, TRAINED_FILE) if split == HOLDOUT else None
        return unseen or LinearRanker.read(self.table)

    def scorers(self, texts: Any, device: torch.device, split: str | None = None) -> Scorers:
        """Read all scorers as `memory` and `ranker` do; `texts`: embeddings of the labels' texts, if they are used."""
        memory = self.memory(split)
        read = Scorers.read(self.table, texts, memory and memory.to(device))
        return replace(read, linear=self.ranker(split), trained_only=split == HOLDOUT)

    def reranker(self, scorers: Scorers, data: DataLayout, training_data: Data, split: str | None = None) -> Reranker:
        """Rerank by this fusion; for the rows of `split`, which may be those that the fusion was fitted on."""
        frequency = points_beside(data, training_data, split)
        return Reranker(self.fusion, scorers, frequency, self.shortlist, held_out=self.fits(split))


def points_beside(data: DataLayout, training_data: Data, split: str | None) -> np.ndarray:
    """Count the training points of each label, int64 [L]; for the held-out rows, only the other rows' points.

    Raises TableError.
    """
    frequency = label_statistics(data).frequency
    if split != HOLDOUT:
        return frequency
    _, table, share = open_held_out(data, HOLDOUT, training_data, "A fusion")
    groups = [list_column(rows, "label_ids").entries for rows in share.batches(table, ["label_ids"])]
    return frequency - np.bincount(np.concatenate(groups), minlength=len(frequency))


def publish_fusion(
    data: str,
    run: str,
    checkpoint: Checkpoint,
    fusion: Fusion,
    facts: dict[str, Any],
    memory: Memory | None = None,
    linear: Mapping[str, LinearRanker] | None = None,
    others: Sequence[Neighbours | Names | None] = (),
) -> Manifest:
    """Publish a fusion, a memory, rankers by file name, and other scorers; replaces an earlier fusion."""
    url = RunLayout(run).fusion(checkpoint.step)
    with building(url, "fitted") as build:
        return build.publish(
            Manifest(
                kind=KIND,
                shards=(
                    write_file(build.url, *fusion_file(fusion)),
                    *(memory.write(build.url) if memory else ()),
                    *(ranker.write(build.url, name) for name, ranker in (linear or {}).items()),
                    *(scorer.write(build.url) for scorer in others if scorer is not None),
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
    scorers = opened.scorers(texts, model.device, split)
    return opened.reranker(scorers, layout, find_earlier(layout, RunLayout(run), checkpoint.step)[0].data, split)


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
    file = next((shard for shard in table.shards if shard.path in (*FUSION_FILES, OWN_SCORE)), None)
    if file is None:
        raise TableError(f"{url}: contains none of {', '.join((*FUSION_FILES, OWN_SCORE))}. Fit the fusion again.")
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


REFIT_HOLDOUT = 0.05  # if a larger fraction of rows is held out, the ranker is fitted again with these rows


def fit_ranker(
    data: str,
    recipe: Recipe,
    budget: int = RANKER_BUDGET,
    seconds: float = math.inf,
    held_out: bool = False,
    title: float | None = None,
) -> LinearRanker | None:
    """Fit the linear ranker to the training rows of `recipe` with `LinearRanker.of`; None for a mix or without rows.

    Raises TableError, StorageError.
    """
    if recipe.data.mix:
        return None
    columns = columns_of(recipe.encoder.inputs)
    return LinearRanker.of(DataLayout(data), recipe.data, columns, budget, held_out, seconds, title)


def index_words(
    data: DataLayout, recipe: Recipe, budget: int = RANKER_BUDGET
) -> tuple[Neighbours | None, Names | None]:
    """Index the words of training rows and of labels' names; None for a mix, or without words. Raises TableError."""
    columns = columns_of(recipe.encoder.inputs)
    if recipe.data.mix or not budget:
        return None, None
    names = Names.of_data(data, recipe.data) if TOKENS in columns else None
    return Neighbours.of(data, recipe.data, columns, budget), names


def fit_fusion(
    data: str,
    run: str,
    options: FitOptions = DEFAULTS,
    budget: int = BUDGET,
    ranker_budget: int = RANKER_BUDGET,
    ranker: LinearRanker | None = None,
    seconds: float = math.inf,
) -> tuple[Manifest, dict[str, Metrics]]:
    """Fit a fusion for a checkpoint: boosted trees, or weights if rows are few or show that weights are better.

    Weights are for labels' texts, a memory and a linear ranker; trees also read nearest texts and names of labels by
    words. Rows whose text a training row has are left out, because training rows give their labels away. The choice
    and the printed figures use scores of trees that were fitted without a row's text, and of weights, four numbers,
    that were fitted with it; labels that only held-out rows have do not count, unless DATA has more such labels.

    The memory takes at most `budget` bytes, and is stored if it is used: then with the held-out points, too, although
    the fusion was fitted without them. Without a `ranker`, one is fitted to training rows of at most `ranker_budget`
    bytes (0: no rows, and no other scorer of words), in at most `seconds`. It is stored if it is used, and fitted again
    with the held-out rows if there are many. An existing fusion is replaced. Also returns metrics of these rows, by
    "fused scores", as they were judged, and by "vectors". Raises InputError if the split or device does not exist.
    Raises TableError, StorageError.
    """
    layout = DataLayout(data)
    options = options.model_copy(update={"queries": min(options.queries, MOST_QUERIES)})
    recipe, model, checkpoint, split, groups = _open_validation(data, run, options)
    groups, repeated = _without_repeated(layout, recipe, groups)
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
    words = index_words(layout, recipe, ranker_budget)
    scorers = Scorers(texts, memory and memory.to(model.device), ranker, *words, trained_only=True)
    scored, relevant = score_shortlists(model, scorers, groups, options.shortlist)
    right, frequency = relevant.contains(scored.ids), points_beside(layout, recipe.data, split)
    given_away = _given_away(relevant, frequency)
    kept = (scored.ids != PAD) & ~given_away[scored.ids]
    judged = replace(scored, ids=np.where(kept, scored.ids, PAD), near=scored.near & kept)
    wanted = relevant.keep(~given_away[relevant.entries])
    of_labels = np.where(scored.ids == PAD, 0, frequency[scored.ids])
    hashes = np.concatenate([hash_texts(Inputs.of(rows, model.columns)) for rows in groups])
    weights: FusionWeights = FusionWeights.fit(judged, wanted.contains(judged.ids))
    fusion: Fusion = weights
    propensity = label_statistics(layout).inverse_propensity

    def rank(scores: np.ndarray) -> Metrics:
        """Return the metrics of the labels in the order of `scores` [B, S]."""
        order = np.argsort(-np.where(judged.ids == PAD, -np.inf, scores), axis=1, kind="stable")
        ranked = Metrics((1, 5), propensity)
        ranked.update(np.take_along_axis(judged.ids, order, 1), wanted, hashes)
        return ranked

    metrics = {"vectors": rank(judged.by["vector"])}
    if "words" in judged.by:
        metrics["linear ranker"] = rank(judged.by["words"])
    metrics["weights"] = rank(weights.fuse(judged))
    if relevant.rows >= FEWEST_FOR_TREES and FusionTrees.can_fit(scored, right, hashes):
        trees = FusionTrees.fit(weights, scored, right, of_labels, hashes)
        metrics["trees"] = rank(trees.fuse(judged, of_labels, hashes))
        if metrics["trees"].result()[CHOSEN_BY] > metrics["weights"].result()[CHOSEN_BY]:
            fusion = trees
    is_trees = isinstance(fusion, FusionTrees)
    memory = memory.extended(whole) if memory and whole and (is_trees or weights.votes) else None
    facts: dict[str, Any] = {
        "split": split,
        "queries": relevant.rows,
        "repeated": repeated,
        "given_away": np.flatnonzero(given_away).tolist(),
        "shortlist": options.shortlist,
        "by": "trees" if is_trees else "weights",
        "texts": weights.texts,
        "votes": weights.votes,
        "linear": weights.linear,
        "unit": weights.unit,
        "metrics": {
            name: {metric: round(value, 2) for metric, value in each.result().items() if metric in SHOWN}
            for name, each in metrics.items()
        },
        FACTS: memory.facts if memory else None,
        "memory_bytes": memory.bytes if memory else 0,
    }
    kept = {FILE: ranker} if ranker and (is_trees or weights.linear) else {}
    if kept and recipe.data.holdout > REFIT_HOLDOUT:
        all_rows = fit_ranker(data, recipe, ranker_budget, seconds, held_out=True, title=kept[FILE].words.title)
        kept = {FILE: all_rows or kept[FILE], TRAINED_FILE: kept[FILE]}
    manifest = publish_fusion(data, run, checkpoint, fusion, facts, memory, kept, words if is_trees else ())
    return manifest, {"fused scores": metrics[facts["by"]], "vectors": metrics["vectors"]}


FEWEST_FOR_TREES = 60  # with 43, trees were worse than weights; with 90, they were better on four sets
MOST_QUERIES = 3_000  # trees gain nothing from more, and take longer
CHOSEN_BY, SHOWN = "nDCG@5", ("P@1", "P@5", "nDCG@5")
_FEWEST = 20  # rows with new texts, or with known labels; with fewer, the other rows or labels are used, too


def _without_repeated(data: DataLayout, recipe: Recipe, groups: list[pa.Table]) -> tuple[list[pa.Table], list[int]]:
    """Return the rows whose texts no training row has, and the hashes of the other rows' texts."""
    if recipe.data.mix:
        return groups, []
    columns = columns_of(recipe.encoder.inputs)
    hashes = [hash_texts(Inputs.of(rows, columns)) for rows in groups]
    sought = np.unique(np.concatenate(hashes))
    found = np.zeros(len(sought), bool)
    for rows in recipe.data.training_rows.batches(open_queries(data, recipe.data.split), columns):
        found |= np.isin(sought, hash_texts(Inputs.of(rows, columns)))
    known = sought[found]
    new = [~np.isin(each, known) for each in hashes]
    if sum(map(np.count_nonzero, new)) < _FEWEST:
        return groups, []
    kept = [rows.filter(pa.array(mask)) for rows, mask in zip(groups, new, strict=True) if mask.any()]
    return kept, known.tolist()


def _given_away(labels: Ragged, frequency: np.ndarray) -> np.ndarray:
    """Return which labels [L] of rows do not count when these rows judge a fusion; `labels`: the rows' labels.

    DATA often has only labels of its rows. Then a label without training points belongs to a held-out row, and no new
    row could have such a label. All count if most labels without training points belong to none of the rows, or if
    hardly any row would keep a label.
    """
    unseen, own = frequency == 0, np.zeros(len(frequency), bool)
    own[labels.entries] = True
    found = unseen & own
    enough = np.count_nonzero(labels.keep(~found[labels.entries]).counts) >= _FEWEST
    return found & enough & (2 * np.count_nonzero(found) > np.count_nonzero(unseen))


def carry_fusion(data: str, run: str, earlier: str, device: str = "auto") -> Manifest | None:
    """Copy the fusion of the run `earlier` that `run` continues: weights and linear ranker, but with a new memory.

    Nothing is fitted; the ranker is the one without the rows that `earlier` held out, and the memory's index is tuned
    on the memory's own points. Returns None if `earlier` has no fusion, or if `run` already has a fusion. Raises the
    same errors as `fit_fusion`.
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
    memory, is_trees = None, isinstance(fusion, FusionTrees)
    if (is_trees or (isinstance(fusion, FusionWeights) and fusion.votes)) and not recipe.data.mix:
        memory = Memory.build(model, layout, recipe.data)
        memory = memory.indexed(torch.from_numpy(memory.vectors[: 3 * TUNED].astype(np.float32)))
    ranker = carried.ranker(HOLDOUT)  # no row that `run` holds out has trained this ranker
    rankers = {FILE: ranker} if ranker else {}
    measured = table.parameters.get("carried_from", earlier)  # the run that fitted the fusion
    facts = {**table.parameters, "carried_from": measured, FACTS: memory.facts if memory else None}
    facts["memory_bytes"] = memory.bytes if memory else 0
    if recipe.data.holdout and carried.fits(HOLDOUT):
        _, held_out, share = open_held_out(layout, HOLDOUT, recipe.data, "A fusion")
        groups = list(share.batches(held_out, [*model.columns, "label_ids"]))
        groups, facts["repeated"] = _without_repeated(layout, recipe, groups)
        labels = Ragged.join([Ragged.empty(0), *(list_column(rows, "label_ids") for rows in groups)])
        beside = points_beside(layout, recipe.data, HOLDOUT)
        facts["given_away"] = np.flatnonzero(_given_away(labels, beside)).tolist()
    words = index_words(layout, recipe) if is_trees else ()
    return publish_fusion(data, run, checkpoint, fusion, facts, memory, rankers, words)


def describe_fusion(facts: dict[str, Any]) -> list[str]:
    """Return lines: the weights, the scores, and the size and speed of the memory, if there is one."""
    trees = ", and boosted trees over these, nearest texts and labels' names" if facts["by"] == "trees" else ""
    left_out = f" (without {len(facts['repeated']):,} texts that training rows have)" if facts["repeated"] else ""
    return [
        f"fitted on {facts['queries']:,} queries of {facts['split']}{left_out}: vectors + {facts['texts']:.2f} x "
        f"labels' texts + {facts['votes']:.2f} x votes of training points + {facts['linear']:.2f} x "
        f"linear ranker{trees}",
        "P@1 / P@5 on these queries: "
        + ", ".join(f"{name} {of['P@1']:.1f} / {of['P@5']:.1f}" for name, of in facts["metrics"].items()),
        *([f"training points that vote: {describe_memory(facts[FACTS])}"] if facts[FACTS] else []),
    ]


def score_shortlists(
    model: Model, scorers: Scorers, groups: Iterable[pa.Table], shortlist: int, with_relevant: bool = False
) -> tuple[ShortlistScores, Ragged]:
    """Return the scores [B, S] of all scorers on the queries' shortlists, and the queries' labels.

    `with_relevant`: also score a query's own labels that are not in the shortlist, unless a filter removes the labels.
    """
    labels, parts, relevant = LabelRows(model.head.vectors, model.head.start), list[ShortlistScores](), []
    for rows in groups:
        x, filters, positives = model.embed_table(rows), filters_of(rows), list_column(rows, "label_ids")
        shortlisted = filtered_top_k(x, labels, shortlist, Ragged.empty(len(x)))
        listed = np.full((len(x), 0), PAD, np.int64)
        if with_relevant:
            listed = positives.padded()
            listed = np.where(filters.contains(listed), PAD, listed)
        part = scorers.score(x, Inputs.of(rows), labels, shortlisted, listed)
        struck = filters.contains(part.ids)
        parts.append(replace(part, ids=np.where(struck, PAD, part.ids)))
        relevant.append(positives)
    width = max(part.ids.shape[1] for part in parts)

    def join_rows(arrays: Iterable[np.ndarray], pad: float = 0) -> np.ndarray:
        return np.concatenate([pad_columns(array, width, pad) for array in arrays])

    by = {name: join_rows(part.by[name] for part in parts) for name in parts[0].by}
    all_ids, near = join_rows((part.ids for part in parts), PAD), join_rows(part.near for part in parts)
    return ShortlistScores(all_ids, near, by), Ragged.join(relevant)


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
