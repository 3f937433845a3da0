"""Look into anything: data, tables, runs, exports; texts of the rows of DATA."""

import bisect
import itertools
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from extremis.console import Bar, say
from extremis.result import Grid
from extremis.summary import splits_of
from pipelines.options import ShardOptions
from schemas import PAD, storage
from schemas.arrow import DENSE_MODEL
from schemas.errors import InputError, TableError, without_controls
from schemas.hashing import hash_strings
from schemas.layout import MANIFEST, DataLayout, RunLayout
from schemas.manifest import Manifest, is_published
from schemas.shard_files.parquet import matrix_column
from schemas.storage import join
from schemas.table import Table, run_tables
from schemas.versions import Version
from trainer.methods.keys import flatten

Shown = list[Grid | str]


def inspect_url(
    url: str, *, verify: bool, rows: int, key: str | None, split: str | None, run: str | None
) -> tuple[dict[str, Any], Shown]:
    """Return a description of `url`, as an object and to be shown.

    Raises InputError, and TableError if a table is missing or damaged.
    """
    shown: Shown = []
    url = url.removesuffix("/").removesuffix("/" + MANIFEST)
    layout = None if run is None else RunLayout(run)
    if layout is not None:
        from trainer.recipe_files import load_config

        load_config(layout.config)  # raises InputError if there is no run
    if key is not None or layout is not None:
        body = inspect_queries(DataLayout(url), rows, split, shown, key, layout)
    elif is_published(url) and (manifest := Table.open(url).manifest).kind != "data":
        body = _inspect_table(url, manifest, verify, rows, shown)
    else:
        body = _inspect_prefix(url, verify, rows, split, shown)
    return body, shown


def _inspect_prefix(url: str, check: bool, rows: int, split: str | None, shown: Shown) -> dict[str, Any]:
    """Describe the tables below `url`, their problems, and the first queries of a DATA.

    With `check`, verify every byte. Raises TableError.
    """
    data = Table.open(url, "data").manifest if is_published(url) else None
    layout = RunLayout(url)
    is_run = data is None and storage.exists(layout.config)
    tables = list_tables(url)
    if data is None and not is_run and not tables:
        Table.open(url)  # raises
    mismatches = find_mismatches(data, tables)
    kind = "data" if data else "run" if is_run else "prefix"
    size = sum(shard.bytes for item in tables if item.manifest is not None for shard in item.manifest.shards)
    fields = [f"{len(tables)} tables, {size:,} bytes"]
    if is_run:
        fields.append("finished" if storage.exists(layout.finished) else "not finished")
    if data is not None:
        fields.append(f"digest {data.digest}")
    grid, described = _describe(tables, mismatches)
    shown += [f"{url}: {kind}, {', '.join(fields)}", grid]
    for name, fault in mismatches.items():
        say(f"{name or url}: {fault}")
    if data is not None:
        shown += [*_lines({"made by": _writer(data)}), *_section(data, "parameters")]
        if data.parameters.get("options"):  # empty if vectors in files were mined
            shown.append(f"to create DATA again (INPUT: the input files):\n  {sharding_command(url, data)}")
    if kind == "prefix" and {"queries", "labels"} <= set(storage.list_names(url)):
        Table.open(url)  # raises for an unfinished DATA, whose faults are said above
    if check:
        _verify_tables({item.url: item.manifest for item in tables if item.manifest is not None})
    body = {
        "kind": kind,
        "verified": check,
        "bytes": size,
        "tables": described,
        "checks": {name: [fault] for name, fault in mismatches.items()},
    }
    if data is not None:
        body |= {"digest": data.digest, "commit": data.commit, "parameters": data.parameters}
        body["command"] = sharding_command(url, data)
        body |= inspect_queries(DataLayout(url), rows, split, shown)
    if mismatches and check:
        raise TableError(f"{url}: {len(mismatches)} item(s) do not match the manifests; see above.")
    return body


FEATURES_SHOWN = 12
LONGEST_QUERY = 600
LONGEST_LABEL = 160


def clean_text(text: str, longest: int | None = None) -> str:
    """Return `text` on one line, without control characters, truncated to `longest` characters."""
    text = without_controls(" ".join(text.split()))
    return text if longest is None or len(text) <= longest else text[: longest - 1] + "…"


def text_columns(queries: Table) -> list[str]:
    """Return the columns that `TextDecoder.texts` reads."""
    kinds = ["text"], ["input_ids"], ["feature_ids", "feature_values"]
    return next((names for names in kinds if names[0] in queries.columns), [])


class TextDecoder:
    """Decoder that turns token ids and label ids of DATA into texts. Raises TableError if DATA is not finished."""

    def __init__(self, data: DataLayout) -> None:
        self._data = data
        Table.open(data.root, "data")

    @cached_property
    def _labels(self) -> Table:
        return Table.open(self._data.labels, "labels")

    @cached_property
    def _tokenizer(self) -> Any:
        from pipelines.sharding.tokenizer import FILE, open_tokenizer

        files = Table.open(self._data.tokenizer, "tokenizer").read_files()
        tokenizer = open_tokenizer(files[FILE], self._data.tokenizer)
        if tokenizer.decoder is None and type(tokenizer.model).__name__ == "WordPiece":
            from tokenizers.decoders import WordPiece

            tokenizer.decoder = WordPiece()  # joins the pieces of a word
        return tokenizer

    def texts(self, rows: pa.Table, longest: int | None) -> list[str]:
        """Return the text of each row (query or label): the stored text if there is one, else the decoded tokens."""
        names = rows.column_names
        if "text" in names:
            texts = rows.column("text").to_pylist()
        elif "input_ids" in names:
            texts = self._tokenizer.decode_batch(rows.column("input_ids").to_pylist(), skip_special_tokens=True)
        elif "feature_ids" in names:
            texts = []
            columns = rows.column("feature_ids").to_pylist(), rows.column("feature_values").to_pylist()
            for ids, values in zip(*columns, strict=True):  # the features with the largest values
                order = np.argsort(-np.abs(np.asarray(values, np.float64)), kind="stable")[:FEATURES_SHOWN]
                largest = " ".join(f"{ids[i]}:{values[i]:.3g}" for i in order.tolist())
                texts.append(f"features {largest}{' …' if len(ids) > FEATURES_SHOWN else ''}")
        else:
            texts = [""] * rows.num_rows
        return [clean_text(text, longest) for text in texts]

    def labels(self, ids: Iterable[int]) -> dict[int, str]:
        """Map label ids to texts, or to keys where texts are empty. Ids below 0 are padding and are ignored."""
        names = {row["label_id"]: (row["text"], str(row["key"])) for row in self.label_rows(ids)}
        return {
            i: clean_text(text, LONGEST_LABEL) or clean_text(key, LONGEST_LABEL) for i, (text, key) in names.items()
        }

    def label_rows(self, ids: Iterable[int]) -> list[dict[str, Any]]:
        """Read label_id, key, text and frequency of labels in the order of their ids; ids below 0 are padding."""
        unique = np.unique(np.fromiter(ids, np.int64))
        unique = unique[(unique >= 0) & (unique < self._labels.rows)]
        rows: list[dict[str, Any]] = self._labels.rows_at(unique, ["label_id", "key", "text", "frequency"]).to_pylist()
        return rows


def find_row(table: Table, key: str) -> int | None:
    """Return the row with this key, or None. Raises TableError for a damaged table.

    `extremis shard` orders rows by a salted hash of the key, so that a binary search reads only a few row groups. If
    a table has a different order, all row groups are searched from the start.
    """
    numbers, seed = range(len(table.groups)), table.parameters.get("seed")

    def keys(number: int) -> pa.Array:
        return table.read_group(number, ["key"]).column("key").combine_chunks()

    likely = len(numbers)  # the group that can contain the key if rows are ordered by hash
    if isinstance(seed, int):
        target = hash_strings(pa.array([key], pa.string()), seed)[0]
        likely = bisect.bisect_left(numbers, target, key=lambda number: hash_strings(keys(number), seed)[-1])
    for number in (*numbers[likely : likely + 1], *numbers):
        position = keys(number).index(key).as_py()
        if position >= 0:
            return int(table.groups.first[number]) + int(position)
    return None


@dataclass
class Example:
    """A query as text. Negatives and predictions are (label id, score) pairs, best first."""

    split: str
    row: int
    key: str
    text: str
    positives: list[int]
    negatives: list[tuple[int, float]] = field(default_factory=list)
    predictions: list[tuple[int, float]] = field(default_factory=list)

    @property
    def label_ids(self) -> list[int]:
        return [*self.positives, *(label for label, _ in self.negatives), *(label for label, _ in self.predictions)]


def read_examples(
    data: DataLayout, split: str, rows: np.ndarray, decoder: TextDecoder, run: RunLayout | None
) -> list[Example]:
    """Read the ascending `rows` of a split, with negatives from the newest table of `run` for this split.

    Raises TableError.
    """
    queries = Table.open(data.queries(split), "queries")
    batch = queries.rows_at(rows, ["query_id", "key", "label_ids", *text_columns(queries)])
    columns = [batch.column(name).to_pylist() for name in ("query_id", "key", "label_ids")]
    texts = decoder.texts(batch, LONGEST_QUERY)
    examples = [
        Example(split, row, clean_text(key, LONGEST_LABEL), text, list(positives))
        for row, key, positives, text in zip(*columns, texts, strict=True)
    ]
    tables = (each.table for each in run_tables(run)) if run is not None else ()
    joined = next((t for t in tables if t.ids_of == "labels" and t.parents.get("queries") == queries.digest), None)
    if joined is not None:
        table = joined.rows_at(rows, ["label_ids", "scores"])
        labels, scores = matrix_column(table, "label_ids"), matrix_column(table, "scores")
        for example, row_labels, row_scores in zip(examples, labels.tolist(), scores.tolist(), strict=True):
            example.negatives = [pair for pair in zip(row_labels, row_scores, strict=True) if pair[0] != PAD]
    return examples


def inspect_queries(
    data: DataLayout,
    rows: int,
    split: str | None,
    shown: Shown,
    key: str | None = None,
    run: RunLayout | None = None,
) -> dict[str, Any]:
    """Describe the query with this `key`, or the first `rows` queries of a split, with hard negatives from `run`.

    Returns {"queries": [...]}, or {} if DATA has no split or `rows` is 0. Raises InputError, TableError.
    """
    decoder, splits = TextDecoder(data), splits_of(data, split)
    if key is not None:
        found = ((name, find_row(Table.open(data.queries(name), "queries"), key)) for name in splits)
        name, row = next(((name, row) for name, row in found if row is not None), ("", None))
        if row is None:
            raise InputError(
                f"{data.root}: no query with key {key!r} in {', '.join(splits)}. "
                f"Keys come from the input (uid, _id, or the line number). Rejected rows are in {data.rejects}."
            )
        numbers = np.asarray([row])
    elif splits and rows:
        name, numbers = splits[0], np.arange(min(rows, Table.open(data.queries(splits[0]), "queries").rows))
    else:
        return {}
    examples = read_examples(data, name, numbers, decoder, run)
    texts, described = decoder.labels(label for example in examples for label in example.label_ids), []
    for example in examples:
        shown += [f"{example.split} row {example.row}, key {example.key}", f"  {example.text}"]
        shown += [f"  + {texts.get(label, label)}  [{label}]" for label in example.positives]
        shown += [f"  - {texts.get(label, label)}  [{label}] {score:.3f}" for label, score in example.negatives]
        if run is not None and not example.negatives:
            shown.append(f"  no hard negatives of {run.root} belong to the split {example.split}")
        positives = [{"label_id": label, "text": texts.get(label, "")} for label in example.positives]
        scored = [{"label_id": n, "text": texts.get(n, ""), "score": score} for n, score in example.negatives]
        facts = {"split": example.split, "query_id": example.row, "key": example.key, "text": example.text}
        described.append({**facts, "positives": positives, "negatives": scored})
    return {"queries": described}


DEPTH = 4  # levels of folders to search
FOLDERS = 10_000  # maximum of folders to search


class ListedTable(NamedTuple):
    """A table below a prefix, with its manifest, or with a description of what is wrong."""

    name: str
    url: str
    manifest: Manifest | None
    fault: str = ""


def list_tables(url: str) -> list[ListedTable]:
    """List every table below the prefix `url`, and every folder of shards without a manifest, sorted by name."""
    folders = 0

    def walk(place: str, name: str, depth: int) -> Iterator[ListedTable]:
        nonlocal folders
        entries = storage.list_names(place)
        folders += 1
        if name and MANIFEST in entries:
            try:
                yield ListedTable(name, place, Table.open(place).manifest)
            except TableError as error:
                yield ListedTable(name, place, None, str(error))
        elif any(entry.startswith("part-") for entry in entries):
            yield ListedTable(name, place, None, f"unfinished: {len(entries)} file(s) and no {MANIFEST}")
        elif depth:
            for entry in entries:
                if "." not in entry and entry != "tensorboard" and folders < FOLDERS:
                    yield from walk(join(place, entry), f"{name}/{entry}".strip("/"), depth - 1)

    return list(walk(url, "", DEPTH))


def find_mismatches(data: Manifest | None, tables: list[ListedTable]) -> dict[str, str]:
    """Find unreadable tables, and tables of DATA whose digests differ from DATA's manifest; return faults by name."""
    faults = {item.name: item.fault for item in tables if item.fault}
    digests = {item.name: item.manifest.digest for item in tables if item.manifest is not None}
    for name, digest in (data.parents if data is not None else {}).items():
        if name not in digests and name not in faults:
            faults[name] = "missing, but listed in the data's manifest: shard again"
        elif name in digests and digests[name] != digest:
            had = f"digest {digests[name][:12]}…, but the data's manifest lists {digest[:12]}…"
            faults[name] = f"{had}: the table was replaced; shard again"
    return faults


def _writer(manifest: Manifest) -> str:
    return f"Extremis {manifest.code_version}, commit {manifest.commit}"


_SHOWN_VALUES = 8  # values shown of a list


def _inspect_table(url: str, manifest: Manifest, check: bool, rows: int, shown: Shown) -> dict[str, Any]:
    """Give information about a table and its first `rows` rows; with `check`, verify its bytes. Raises TableError."""
    if check:
        _verify_tables({url: manifest})
    fields: dict[str, Any] = {
        "kind": manifest.kind,
        "rows": f"{manifest.rows:,}",
        "shards": len(manifest.shards),
        "bytes": f"{sum(shard.bytes for shard in manifest.shards):,}",
        "digest": manifest.digest,
        "made by": _writer(manifest),
    }
    if manifest.columns:
        fields["columns"] = ", ".join(f"{column.name} {column.type}" for column in manifest.columns)
    if manifest.row_group_rows:
        fields["rows per row group"] = f"{manifest.row_group_rows:,}"
    shown += [url, *_lines(fields)]
    for section in ("parents", "parameters", "counters", "quality"):
        shown += _section(manifest, section)
    for group in Table(url, manifest).batches(stop=rows) if manifest.columns else ():
        decoder = _decoder_of(url, manifest) if "input_ids" in group.column_names else None
        texts = decoder.texts(group, LONGEST_LABEL) if decoder else itertools.repeat(None, group.num_rows)
        for row, text in zip(group.to_pylist(), texts, strict=True):
            for name, value in row.items():
                if isinstance(value, str):
                    row[name] = clean_text(value)
                elif isinstance(value, list) and len(value) > _SHOWN_VALUES:
                    row[name] = [*value[:_SHOWN_VALUES], "…"]
            shown.append(str(row if text is None else {**row, "words": text}))
    facts = {"digest": manifest.digest, "commit": manifest.commit, "verified": check}
    return {**facts, **manifest.model_dump(mode="json")}


def _lines(fields: dict[str, Any]) -> list[str]:
    return [f"  {name}: {clean_text(str(value))}" for name, value in fields.items()]


def _section(manifest: Manifest, section: str) -> list[str]:
    """Return a section of a manifest, one entry per line; leave out entries that are None."""
    entries = flatten(getattr(manifest, section))
    return _lines({f"{section}: {name}": value for name, value in entries.items() if value is not None})


def _verify_tables(tables: dict[str, Manifest]) -> None:
    """Verify every byte of the tables, given by URL. Raises TableError that names the first damaged shard."""
    shards = [shard for manifest in tables.values() for shard in manifest.shards]
    total = sum(shard.bytes for shard in shards)
    with Bar("verify", total) as bar:
        for url, manifest in tables.items():
            Table(url, manifest).verify(bar.advance)
    say(f"verified: {len(shards)} shard(s), {total:,} bytes")


def _decoder_of(url: str, manifest: Manifest) -> TextDecoder | None:
    """Find the DATA that the table at `url` belongs to, by the URL and the digest of the tokenizer."""
    depth = {"labels": 1, "queries": 2}.get(manifest.kind)
    if depth is None or "tokenizer" not in manifest.parents:
        return None
    layout = DataLayout(url.rsplit("/", depth)[0] if url.count("/") >= depth else ".")
    try:
        same = Table.open(layout.tokenizer, "tokenizer").digest == manifest.parents["tokenizer"]
        return TextDecoder(layout) if same else None
    except TableError:
        return None


# Others stay the same.
_VERSION_OPTIONS = ("shards", "shard_bytes", "max_reject_share", "unlabelled", "format", "fields", "encoding", "sink")
_PROPENSITY = ("propensity_a", "propensity_b")  # both belong to one flag


def sharding_command(url: str, data: Manifest) -> str:
    """Return the `extremis shard` command that creates the DATA at `url`.

    Manifests do not record paths of inputs. INPUT stands for the input, DATA1 for the earlier version, and TOKENIZER
    for a tokenizer's directory.
    """
    options, version = data.parameters["options"], Version.of(data)
    words = ["extremis", "shard", "INPUT", shlex.quote(url)]
    if version.onto is not None:
        options = {name: options[name] for name in _VERSION_OPTIONS}
        options |= {name: version.choices.get(name) for name in ("again", "labels")}
        words += ["--onto", "DATA1", "--part", shlex.quote(version.part)]
    a, b = (options.get(name) for name in _PROPENSITY)
    if a is not None:
        words += ["--propensity", f"{a},{b}"]
    for name, option in ShardOptions.model_fields.items():
        value = options.get(name)
        if name == "embed":  # the manifest records the content of this option
            value = data.parameters.get(DENSE_MODEL, {}).get("name", value)
        if name not in _PROPENSITY and value not in (None, option.default):
            words.append("--" + (option.alias or name).replace("_", "-"))
            if value is not True:  # else the option has no value
                is_folder = str(value).startswith("directory:")  # then the rest is a tokenizer's digest
                words.append("TOKENIZER" if is_folder else shlex.quote(str(value)))
    return " ".join(words)


def _describe(tables: list[ListedTable], mismatches: dict[str, str]) -> tuple[Grid, dict[str, Any]]:
    rows, described = list[list[str]](), dict[str, Any]()
    for name, _, manifest, fault in tables:
        if manifest is None:
            rows.append([name, "?", "", "", "", "unfinished" if fault.startswith("unfinished") else "damaged"])
            described[name] = {"wrong": fault}
        else:
            sizes = {"shards": len(manifest.shards), "bytes": sum(shard.bytes for shard in manifest.shards)}
            counts = [f"{count:,}" for count in (manifest.rows, *sizes.values())]
            rows.append([name, manifest.kind, *counts, "replaced" if name in mismatches else "ok"])
            fields = manifest.model_dump(include={"kind", "rows", "parents"})
            described[name] = {**fields, **sizes, "digest": manifest.digest}
    return Grid("tables", ["table", "kind", "rows", "shards", "bytes", "state"], rows), described
