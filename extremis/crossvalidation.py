"""Cross-validation of DATA's training rows: their probabilities out of fold, and the labels that are likely wrong."""

import csv
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from extremis.console import Bar
from extremis.inspecting import LONGEST_QUERY, TextDecoder, clean_text
from schemas import PAD, code_version, storage
from schemas.errors import InputError
from schemas.hashing import combine, hash_strings, hash_texts
from schemas.layout import DataLayout
from schemas.ragged import Ragged, SparseRows, offsets_of
from schemas.shard_files.parquet import filters_of, list_column, matrix_array, matrix_column
from schemas.storage import join
from schemas.table import Table
from scoring.crossval import DEPTH, FEWEST, Judged, Rows, Scored, folds_of, judge, points_elsewhere
from scoring.prediction_files import plain_cell
from scoring.words import Points, count_features, join_points, open_vocabulary
from trainer.inputs import Inputs, open_queries, with_titles

_SALT = 0xF01D  # `shard` holds rows out by the hash without it, so that a fold by the same hash would be empty
TOP = 10  # best labels of a row in the table of probabilities, besides the given labels
NEAREST = 3  # rows that are shown with a suspect


class Training(NamedTuple):
    """N training rows as they are scored and shown: `keys`, `texts`, labels that are not predicted (`filters`)."""

    keys: list[str]
    texts: list[str]
    filters: Ragged
    rows: Rows


def read_training(data: DataLayout, folds: int, group: str) -> Training:
    """Read DATA's training rows; rows of a `group` (equal or near texts) are in the same fold. Raises ExtremisError."""
    table, labels = open_queries(data, "train"), Table.open(data.labels, "labels")
    columns = [name for name in ("input_ids", "feature_ids", "feature_values") if name in table.columns]
    if not columns:
        raise InputError(
            f"{table.url}: the rows have only dense vectors, but the linear ranker reads words or features."
        )
    vocabulary = open_vocabulary(data, columns)
    decoder, keys, texts, groups = TextDecoder(data), list[str](), list[str](), list[np.ndarray]()
    pairs, words, positives, filters = list[SparseRows](), list[SparseRows](), list[Ragged](), list[Ragged]()
    more = [name for name in ("text", "filter_label_ids") if name in table.columns]
    for batch in table.batches(["key", *with_titles(table, columns), *more, "label_ids"]):
        inputs, whole = Inputs.of(batch), decoder.texts(batch, None)
        keys += batch["key"].to_pylist()
        texts += (clean_text(text, LONGEST_QUERY) for text in whole)
        same = hash_texts(pa.array(whole), group, _SALT)
        groups.append(combine(same, hash_strings(batch["feature_ids"], _SALT)) if "feature_ids" in columns else same)
        pairs.append(count_features(inputs, vocabulary))
        words.append(count_features(inputs, vocabulary, pairs=False))
        positives.append(list_column(batch, "label_ids"))
        filters.append(filters_of(batch))
    fold = folds_of(np.concatenate(groups), folds)
    fewest = int(np.bincount(fold, minlength=folds).min())
    if not fewest:
        raise InputError(
            parameter="folds", got=str(folds), expected=f"fewer folds for the {len(keys):,} rows of {table.url}"
        )
    own, first = list[Points](), 0
    if {*columns} <= {*labels.columns}:
        for batch in labels.batches(with_titles(labels, columns)):
            numbers = Ragged.from_matrix(np.arange(first, first + batch.num_rows)[:, None])
            own.append(Points(count_features(Inputs.of(batch), vocabulary), numbers))
            first += batch.num_rows
    rows = Rows(
        SparseRows.join(pairs),
        SparseRows.join(words),
        Ragged.join(positives),
        fold,
        labels.rows,
        vocabulary,
        join_points(own) if own else None,
    )
    return Training(keys, texts, Ragged.join(filters), rows)


def score_folds(rows: Rows, out: str, made: Mapping[str, Any]) -> Scored:
    """Score all rows, fold by fold; a file in OUT with the facts `made` has a fold of an earlier call."""
    stated = {b"made": json.dumps(made, sort_keys=True).encode()}
    parts = list[Scored]()
    with Bar("crossval", made["folds"]) as bar:
        for number in range(made["folds"]):
            place = join(out, "folds", f"fold-{number}.parquet")
            if not (storage.exists(place) and _open(place).schema.metadata == stated):
                columns = dict(zip(Scored._fields, rows.score(number), strict=True))
                kinds = {name: pa.from_numpy_dtype(column.dtype) for name, column in columns.items()}
                arrays = {name: matrix_array(column, kinds[name]) for name, column in columns.items()}
                _write(place, pa.table(arrays), stated)
            found = _open(place)
            parts.append(Scored(*(matrix_column(found, name) for name in Scored._fields)))
            bar.update(number + 1)
    order = np.argsort(np.argsort(rows.fold, kind="stable"))
    return Scored(*(np.concatenate(column)[order] for column in zip(*parts, strict=True)))


def _open(place: str) -> pa.Table:
    return pq.read_table(pa.BufferReader(storage.read_bytes(place)))


def join_probabilities(training: Training, scored: Scored, judged: Judged, keys: pa.Array) -> pa.Table:
    """Return one row for each training row: key, fold, and its TOP best and all its given labels with probabilities."""
    ids, labels = scored.ids[:, :TOP], training.rows.labels
    rows, columns = np.nonzero(ids != PAD)
    beyond = (judged.rank == 0) | (judged.rank > TOP)
    row = np.concatenate([rows, labels.row_of()[beyond]])
    label = np.concatenate([ids[rows, columns], labels.entries[beyond]])
    chance = np.concatenate([judged.probabilities[rows, columns], judged.probability[beyond]])
    given = np.concatenate([labels.contains(ids)[rows, columns], np.ones(beyond.sum(), bool)])
    place = np.concatenate([columns, np.where(judged.rank, judged.rank, DEPTH + 1)[beyond]])
    order = np.lexsort((label, place, row))
    offsets = pa.array(offsets_of(np.bincount(row, minlength=labels.rows)).astype(np.int32))
    lists = {
        "labels": keys.take(pa.array(label[order])),
        "label_ids": pa.array(label[order].astype(np.int64)),
        "probabilities": pa.array(chance[order], pa.float32()),
        "given": pa.array(given[order]),
    }
    columns_of_rows = {"key": pa.array(training.keys), "fold": pa.array(training.rows.fold)}
    return pa.table(
        {**columns_of_rows, **{name: pa.ListArray.from_arrays(offsets, each) for name, each in lists.items()}}
    )


def list_suspects(training: Training, scored: Scored, judged: Judged, labels: pa.RecordBatch, limit: int) -> pa.Table:
    """Return the first `limit` given labels by support, and absent labels by probability, in turns, worst first."""
    rows, ids = training.rows, scored.ids[:, :TOP]
    judged_labels = np.flatnonzero(judged.known)
    least = judged_labels[np.argsort(judged.support[judged_labels], kind="stable")[:limit]]
    known = points_elsewhere(rows.labels, rows.fold, rows.count) >= FEWEST
    absent = (ids != PAD) & known[rows.fold[:, None], ids]
    row, column = np.nonzero(absent & ~rows.labels.contains(ids) & ~training.filters.contains(ids))
    likely = np.lexsort((-scored.scores[row, column], -judged.probabilities[row, column]))[:limit]
    row, column = row[likely], column[likely]
    place = np.concatenate([np.arange(len(least)), np.arange(len(likely))]) + 1
    given = np.arange(len(place)) < len(least)
    of_row = np.concatenate([rows.labels.row_of()[least], row])
    label = pa.array(np.concatenate([rows.labels.entries[least], ids[row, column]]).astype(np.int64))
    rank = np.concatenate([judged.rank[least], column + 1])
    shown = [[number for number in some if number != PAD] for some in scored.nearest[of_row, :NEAREST].tolist()]
    columns = {
        "place": place,
        "given": given,
        "key": [training.keys[number] for number in of_row.tolist()],
        "text": [training.texts[number] for number in of_row.tolist()],
        "label": labels["key"].take(label),
        "label_text": labels["text"].take(label),
        "probability": np.concatenate([judged.probability[least], judged.probabilities[row, column]]),
        "rank": pa.array(rank, mask=rank == 0),
        "support": pa.array(np.concatenate([judged.support[least], np.zeros(len(row))]), mask=~given),
        "nearest": [[training.keys[number] for number in some] for some in shown],
        "nearest_texts": [[training.texts[number] for number in some] for some in shown],
    }
    return pa.table(columns).take(pa.array(np.lexsort((~given, place))))


def list_unjudged(training: Training, judged: Judged, labels: pa.RecordBatch) -> pa.Table:
    """Return labels with fewer than FEWEST points in other folds: key, text, points, and keys of the rows concerned."""
    rows = training.rows
    left = np.flatnonzero(~judged.known)
    left = left[np.argsort(rows.labels.entries[left], kind="stable")]
    label, first = np.unique(rows.labels.entries[left], return_index=True)
    keys = [training.keys[number] for number in rows.labels.row_of()[left].tolist()]
    chosen, offsets = pa.array(label.astype(np.int64)), pa.array(np.append(first, len(left)).astype(np.int32))
    points = np.bincount(rows.labels.entries, minlength=rows.count)[label]
    texts = labels["key"].take(chosen), labels["text"].take(chosen)
    of_rows = pa.ListArray.from_arrays(offsets, pa.array(keys, pa.string()))
    return pa.table({"label": texts[0], "label_text": texts[1], "points": points, "rows": of_rows})


def _write(place: str, table: pa.Table, metadata: Mapping[bytes, bytes] | None = None) -> None:
    with storage.writing(place) as path:
        pq.write_table(table.replace_schema_metadata(metadata), path, compression="zstd")


def _write_csv(place: str, table: pa.Table) -> None:
    with storage.writing(place) as path, open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table.column_names)
        writer.writerows(map(plain_cell, row.values()) for row in table.to_pylist())


def crossval(data: str, out: str, folds: int, group: str, suspects: int) -> dict[str, Any]:
    """Score the rows of each fold by the others; write probabilities, suspects and what cannot be judged to OUT.

    `suspects`: most given labels, and most absent labels, that are listed. Raises ExtremisError.
    """
    training = read_training(DataLayout(data), folds, group)
    made = {"data": Table.open(data, "data").digest, "folds": folds, "group": group, "code": code_version()}
    scored = score_folds(training.rows, out, made)
    judged = judge(training.rows, scored)
    named = pa.concat_tables(Table.open(DataLayout(data).labels, "labels").batches(["key", "text"]))
    (labels,) = named.combine_chunks().to_batches()
    listed, apart = list_suspects(training, scored, judged, labels, suspects), list_unjudged(training, judged, labels)
    _write(join(out, "probabilities.parquet"), join_probabilities(training, scored, judged, labels["key"]))
    for name, table in (("suspects", listed), ("unjudged", apart)):
        _write(join(out, f"{name}.parquet"), table)
        _write_csv(join(out, f"{name}.csv"), table)
    given = int(np.count_nonzero(listed["given"]))
    return {
        "data": data,
        "out": out,
        "rows": len(training.keys),
        "folds": folds,
        "group": group,
        "given_labels": len(judged.known),
        "unjudged": int((~judged.known).sum()),
        "unjudged_labels": apart.num_rows,
        "suspects": {"given": given, "absent": listed.num_rows - given},
    }
