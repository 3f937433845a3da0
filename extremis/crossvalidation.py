"""Cross-validation of DATA's training rows: their probabilities out of fold, and the labels that are likely wrong."""

import functools
import gc
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from extremis.console import Bar
from extremis.inspecting import LONGEST_QUERY, TextDecoder, clean_text
from extremis.label_tables import read_names, write_labels
from schemas import PAD, code_version, storage
from schemas.errors import InputError
from schemas.hashing import combine, hash_strings, hash_texts
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import is_published
from schemas.ragged import Ragged, SparseRows, offsets_of
from schemas.shard_files.parquet import filters_of, list_column, matrix_array, matrix_column
from schemas.storage import join
from schemas.table import Table
from scoring.crossval import DEPTH, FEWEST, Judged, Rows, Scored, folds_of, judge
from scoring.linear import label_points
from scoring.words import count_features, open_vocabulary
from trainer.inputs import Inputs, open_queries, with_titles
from trainer.recipe_files import WAIT_FOR_TABLES, applicable_overrides, load_recipe

_SALT = 0xF01D  # `shard` holds rows out by the hash without it, so that a fold by the same hash would be empty
Ranked = tuple[np.ndarray, np.ndarray]  # scores and ids [B, K]
TOP = 10  # best labels of a row in the table of probabilities, besides the given labels
NEAREST = 3  # rows that are shown with a suspect


class Training(NamedTuple):
    """N training rows as they are scored and shown: `keys`, `texts`, labels that are not predicted (`filters`)."""

    keys: pa.Array
    texts: pa.Array
    filters: Ragged
    rows: Rows


def read_training(data: DataLayout, folds: int, group: str) -> Training:
    """Read DATA's training rows; rows of a `group` (equal or near texts) are in the same fold. Raises ExtremisError."""
    table, labels = open_queries(data, "train"), Table.open(data.labels, "labels")
    columns = [name for name in ("input_ids", "feature_ids", "feature_values") if name in table.columns]
    if not columns:
        raise InputError(f"{table.url}: the rows have only dense vectors, but crossval reads words or features.")
    vocabulary, decoder, parts = open_vocabulary(data, columns), TextDecoder(data), []
    more = [name for name in ("text", "filter_label_ids") if name in table.columns]
    for batch in table.batches(["key", *with_titles(table, columns), *more, "label_ids"]):
        inputs, whole = Inputs.of(batch), decoder.texts(batch, None)
        groups = hash_texts(pa.array(whole), group, _SALT)
        if "feature_ids" in columns:
            groups = combine(groups, hash_strings(batch["feature_ids"], _SALT))
        texts = pa.array([clean_text(text, LONGEST_QUERY) for text in whole], pa.string())
        counted = (count_features(inputs, vocabulary, pairs) for pairs in (True, False))
        labels_of = list_column(batch, "label_ids"), filters_of(batch)
        parts.append((batch["key"].combine_chunks(), texts, groups, *counted, *labels_of))
    keys, shown, hashes, pairs, words, given, filters = zip(*parts, strict=True)
    fold = folds_of(np.concatenate(hashes), folds)
    if not np.bincount(fold, minlength=folds).all():
        expected = f"fewer folds for the {len(fold):,} rows of {table.url}"
        raise InputError(parameter="folds", got=str(folds), expected=expected)
    own, given = [*label_points(labels, columns, vocabulary)], Ragged.join(given)
    rows = Rows(SparseRows.join(pairs), SparseRows.join(words), given, fold, labels.rows, vocabulary, own)
    return Training(pa.concat_arrays(keys), pa.concat_arrays(shown), Ragged.join(filters), rows)


def score_folds(rows: Rows, out: str, made: Mapping[str, Any], rank: Callable[..., Ranked] | None = None) -> Scored:
    """Score all rows, fold by fold; a file in OUT with the facts `made` has a fold of an earlier call.

    `rank(folder, number)` ranks labels for a fold instead of a linear ranker; `folder` has what it left unfinished.
    """
    stated, parts = json.dumps(made, sort_keys=True).encode(), list[Scored]()
    with Bar("crossval", made["folds"], quiet=rank is not None) as bar:
        for number in range(made["folds"]):
            place = join(out, "folds", f"fold-{number}.parquet")
            found = pq.read_table(pa.BufferReader(storage.read_bytes(place))) if storage.exists(place) else None
            if found is None or found.schema.metadata != {b"made": stated}:
                folder = join(out, "folds", f"{storage.sha256(stated)[:16]}-{number}")
                scored = rows.score(number, rank(folder, number) if rank else None)._asdict()
                arrays = {name: matrix_array(each, pa.from_numpy_dtype(each.dtype)) for name, each in scored.items()}
                found = pa.table(arrays, metadata={b"made": stated})
                write_labels(found, place)
                storage.remove(folder, recursive=True)
            parts.append(Scored(*(matrix_column(found, name) for name in Scored._fields)))
            bar.update(number + 1)
    order = np.argsort(np.argsort(rows.fold, kind="stable"))
    return Scored(*(np.concatenate(column)[order] for column in zip(*parts, strict=True)))


# A fold's data have no parts, and no rows but those that the model may see; its scores may not depend on timing.
_OF_FOLD = ("data.split=train", "data.parts=", "validation.split=", "validation.parts=", WAIT_FOR_TABLES)


def open_recipe(recipe: str) -> tuple[str, list[str], dict[str, Any]]:
    """Return the file of a recipe, or of a run's recipe, the changes of a fold, and the keys. Raises InputError."""
    config = RunLayout(recipe).config
    source = config if storage.exists(config) else recipe
    keys = load_recipe(source, changes := applicable_overrides(source, _OF_FOLD))
    if earlier := keys.train.start_from or keys.train.encoder_from:
        raise InputError(parameter="recipe", got=recipe, expected=f"one without {earlier}, which has seen all rows")
    return source, changes, keys.model_dump(mode="json")


def rank_by_recipe(data: DataLayout, rows: Rows, recipe: Sequence[Any], folder: str, number: int) -> Ranked:
    """Train a recipe without a fold's rows in `folder`, and rank labels for them by its vectors: as of `Rows.score`.

    `recipe`: a file, and changes. A run that was interrupted goes on. Raises ExtremisError.
    """
    from extremis.auto import publish_excerpt
    from extremis.supervisor import train
    from trainer.device import open_device
    from trainer.evaluation.ranking import Ranking
    from trainer.model import load_model
    from trainer.settings.resolve import resolve

    table, inside, parts = open_queries(data, "train"), rows.fold == number, list[Ranked]()
    layout, run = DataLayout(join(folder, "data")), RunLayout(join(folder, "run"))
    if not is_published(layout.root):
        others, labels = table.rows_at(np.flatnonzero(~inside)), Table.open(data.labels, "labels").read()
        publish_excerpt(data, layout.root, others, labels, rows.points_elsewhere[number])
    settled = resolve(recipe[0], recipe[1], layout.root).recipe
    if not storage.exists(run.finished):
        train(layout.root, run.root, settled, resume=True, beam_options=(), title=f"crossval: fold {number + 1}")
        gc.collect()  # a trainer has reference cycles
    _, model, _ = load_model(layout, run, device=open_device(settled.train.device))
    for some in np.array_split(np.flatnonzero(inside), -(-int(inside.sum()) // 1024)):
        x = model.embed_table(table.rows_at(some, with_titles(table, model.columns)))
        parts.append(Ranking.of(model).top_k(x, DEPTH, Ragged.empty(len(x))))
    scores, ids = map(np.concatenate, zip(*parts, strict=True))
    return np.where(ids == PAD, 0, np.logaddexp(0, scores)), ids


def join_probabilities(training: Training, scored: Scored, judged: Judged, keys: pa.ChunkedArray) -> pa.Table:
    """Return one row for each training row: key, fold, and its TOP best and all its given labels with probabilities."""
    ids, labels = scored.ids[:, :TOP], training.rows.labels
    best, beyond = np.nonzero(ids != PAD), (judged.rank == 0) | (judged.rank > TOP)
    columns = {
        "row": (best[0], labels.row_of()[beyond]),
        "place": (best[1], np.where(judged.rank, judged.rank, DEPTH + 1)[beyond]),
        "label_ids": (ids[best], labels.entries[beyond].astype(np.int64)),
        "probabilities": (judged.probabilities[:, :TOP][best], judged.probability[beyond]),
        "given": (labels.contains(ids)[best], np.ones(beyond.sum(), bool)),
    }
    pairs = pa.record_batch({name: pa.array(np.concatenate(parts)) for name, parts in columns.items()})
    pairs = pairs.sort_by([(name, "ascending") for name in ("row", "place", "label_ids")])
    lists = {"labels": keys.chunk(0).take(pairs["label_ids"]), **{name: pairs[name] for name in [*columns][2:]}}
    counts, known = np.bincount(pairs["row"], minlength=labels.rows), {"key": training.keys, "fold": training.rows.fold}
    return pa.table({**known, **{name: _divide(lists[name], counts) for name in lists}})


def _divide(values: pa.Array, counts: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets_of(counts).astype(np.int32)), values)


def list_suspects(training: Training, scored: Scored, judged: Judged, labels: pa.Table, limit: int) -> pa.Table:
    """Return the first `limit` given labels by support, and absent labels by probability, in turns, worst first."""
    rows, ids = training.rows, scored.ids[:, :TOP]
    order = np.argsort(judged.support, kind="stable")
    least = order[judged.known[order]][:limit]
    absent = (ids != PAD) & (rows.points_elsewhere[rows.fold[:, None], ids] >= FEWEST)
    row, column = np.nonzero(absent & ~rows.labels.contains(ids) & ~training.filters.contains(ids))
    likely = np.lexsort((-scored.scores[row, column], -judged.probabilities[row, column]))[:limit]
    row, column = row[likely], column[likely]
    place = np.concatenate([np.arange(len(least)), np.arange(len(likely))]) + 1
    given = np.arange(len(place)) < len(least)
    of_row = np.concatenate([rows.labels.row_of()[least], row])
    names = labels.take(pa.array(np.concatenate([rows.labels.entries[least], ids[row, column]]).astype(np.int64)))
    rank = np.concatenate([judged.rank[least], column + 1])
    near = scored.nearest[of_row, :NEAREST]
    nearest, counts = pa.array(near[near != PAD]), (near != PAD).sum(1)
    columns = {
        "place": place,
        "given": given,
        "key": training.keys.take(pa.array(of_row)),
        "text": training.texts.take(pa.array(of_row)),
        "label": names["key"],
        "label_text": names["text"],
        "probability": np.concatenate([judged.probability[least], judged.probabilities[row, column]]),
        "rank": pa.array(rank, mask=rank == 0),
        "support": pa.array(np.concatenate([judged.support[least], np.zeros(len(row))]), mask=~given),
        "nearest": _divide(training.keys.take(nearest), counts),
        "nearest_texts": _divide(training.texts.take(nearest), counts),
    }
    return pa.table(columns).take(pa.array(np.lexsort((~given, place))))


def list_unjudged(training: Training, judged: Judged, labels: pa.Table) -> pa.Table:
    """Return labels with fewer than FEWEST points in other folds: key, text, points, and keys of the rows concerned."""
    entries, left = training.rows.labels.entries, np.flatnonzero(~judged.known)
    left = left[np.argsort(entries[left], kind="stable")]
    label, counts = np.unique(entries[left], return_counts=True)
    names, points = labels.take(pa.array(label.astype(np.int64))), np.bincount(entries)[label]
    of_rows = _divide(training.keys.take(pa.array(training.rows.labels.row_of()[left])), counts)
    return pa.table({"label": names["key"], "label_text": names["text"], "points": points, "rows": of_rows})


def crossval(data: str, out: str, folds: int, group: str, suspects: int, recipe: str | None) -> dict[str, Any]:
    """Score the rows of each fold by the others; write probabilities, suspects and what cannot be judged to OUT.

    `suspects`: most given labels, and most absent labels, that are listed. `recipe`: a recipe or a run; None: a linear
    ranker. Raises ExtremisError.
    """
    layout = DataLayout(data)
    *chosen, keys = (None,) if recipe is None else open_recipe(recipe)
    training = read_training(layout, folds, group)
    made = {"data": Table.open(data, "data").digest, "folds": folds, "group": group, "code": code_version()}
    rank = functools.partial(rank_by_recipe, layout, training.rows, chosen) if chosen else None
    scored = score_folds(training.rows, out, {**made, "recipe": keys}, rank)
    judged, labels = judge(training.rows, scored), read_names(layout).combine_chunks()
    listed, apart = list_suspects(training, scored, judged, labels, suspects), list_unjudged(training, judged, labels)
    write_labels(join_probabilities(training, scored, judged, labels["key"]), join(out, "probabilities.parquet"))
    for name, table in {"suspects": listed, "unjudged": apart}.items():
        write_labels(table, join(out, f"{name}.parquet"))
        write_labels(table, join(out, f"{name}.csv"))
    given = int(np.count_nonzero(listed["given"]))
    return {
        "rows": len(training.keys),
        "given_labels": len(judged.known),
        "unjudged": int((~judged.known).sum()),
        "unjudged_labels": apart.num_rows,
        "suspects": {"given": given, "absent": listed.num_rows - given},
    }
