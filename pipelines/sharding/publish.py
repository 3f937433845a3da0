"""What a data set is made of, which phases are finished, and how the tables are published.

First the identity of the input, then the phases that an interrupted run resumes from, then rejects and publishing.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from pipelines.flow import FileExchange, Packet, gather, group_by_key, receive, send_together, split_by
from pipelines.formats import base
from pipelines.formats.base import LABELS, Inputs, Reason
from pipelines.job import Summary, as_json, describe
from pipelines.options import ShardOptions
from pipelines.progress import Progress
from pipelines.sharding.plans import BLOCKS, IDS, LABELS_DONE, REJECTS, ROWS, LabelsPlan, QueriesPlan, tokenizer_url
from pipelines.sharding.tokenizer import FILE, FrozenTokenizer
from schemas import arrow, code_version, storage
from schemas import manifest as manifests
from schemas.errors import ClaimLostError, InputError, StorageError, TableError, option
from schemas.layout import MANIFEST, DataLayout
from schemas.manifest import Manifest
from schemas.owners import Build, Claim
from schemas.shard_files import parquet
from schemas.storage import join
from schemas.table import Request, Table, find_reusable
from schemas.versions import VERSION

READ, JOINED, TOKENIZED = "read", "joined", "tokenized"  # phases
_DONE = {
    READ: "rows have been read",
    JOINED: "rows have been read, and label ids are known",
    TOKENIZED: "rows have been read and tokenized",
}
_NEEDED = {
    READ: (BLOCKS, REJECTS),
    JOINED: (BLOCKS, REJECTS, LABELS_DONE, IDS),
    TOKENIZED: (REJECTS, LABELS_DONE, ROWS),
}
_GROUP_ROWS = 8192
_LINES = 1 << 17  # lines of a file whose rejects are sorted together


def files_of(inputs: Inputs) -> tuple[str, ...]:
    """List the distinct URLs of all input files."""
    return tuple(sorted({url for _, url in _places(inputs)}))


def read_files(inputs: Inputs) -> dict[str, tuple[int, str]]:
    """Return each input file's size in bytes and SHA-256, by URL. Raises InputError, StorageError."""
    return base.of_each(base.identify, files_of(inputs))


def identity(inputs: Inputs, files: Mapping[str, tuple[int, str]]) -> dict[str, dict[str, Any]]:
    """Return the name, size in bytes and SHA-256 of the files of each kind.

    In a format with keys, the names and the order of files do not matter, so several files of one kind are identified
    by their sorted digests.
    """
    described: dict[str, dict[str, Any]] = {}
    for kind, urls in group_by_key(_places(inputs)):
        digests = [files[url][1] for url in urls]
        if inputs.keyed:
            digests.sort()
        digest = digests[0] if len(urls) == 1 else storage.sha256("".join(digests).encode())
        name = urls[0].rsplit("/", 1)[-1] if not inputs.keyed and len(urls) == 1 else f"{len(urls)} file(s)"
        described[kind] = {"file": name, "bytes": sum(files[url][0] for url in urls), "sha256": digest}
    return described


def _places(inputs: Inputs) -> list[tuple[str, str]]:
    """List (kind, URL) of every file: `train`, or `train/text` if a part has several files."""
    places = [
        (part.table if len(part.files) == 1 else f"{part.table}/{role}", url)
        for part in inputs.parts
        for role, url in part.files.items()
    ]
    return [*places, *((f"filter/{split}", url) for split, url in inputs.filters.items())]


def digest(inputs: Inputs, recorded: Mapping[str, Any], version: Mapping[str, Any] | None) -> str:
    """Return the digest of everything that determines the work, except file contents, which are compared separately."""
    parts = [[part.table, part.name, dict(part.files), part.rows, vars(part.contents)] for part in inputs.parts]
    work = [code_version(), inputs.format, parts, dict(inputs.filters), dict(recorded), version and dict(version)]
    return storage.sha256(json.dumps(work, sort_keys=True).encode())


def open_finished(
    data: str, inputs: Mapping[str, Any], options: Mapping[str, Any], version: Mapping[str, Any] | None = None
) -> Manifest:
    """Open the data set at `data`, which must have been built from `inputs` with `options`, as this `version`.

    Raises InputError if the data set was built differently, and TableError if a table is damaged.
    """
    remedy = f"Give another DATA, or {option('overwrite', True)} to replace it."
    manifest = find_reusable(data, Request("data", None, {"input": inputs, "options": options}), remedy)
    assert manifest is not None
    made = manifest.parameters.get(VERSION, {}).get("choices")
    if made != (None if version is None else dict(version)):
        raise InputError(f"{data}: this finished data set was built with a different {option('onto')}. {remedy}")
    for table, digest in manifest.parents.items():
        if Table.open(join(data, table)).digest != digest:
            raise TableError(f"{join(data, table)}: this table was replaced after {data} was published. {remedy}")
    return manifest


def clear(data: str) -> None:
    """Unpublish and remove the data set at `data`, whether finished or not."""
    manifests.unpublish(data)
    for name in DataLayout.FOLDERS:
        storage.remove(join(data, name), recursive=True)


@dataclass
class Phases:
    """Records and files of phases below `root`, written by the owner of `claim`. `digest` identifies the work."""

    root: str
    digest: str
    claim: Claim
    needed: set[str] = field(default_factory=set)  # names under the root that stay for a later run

    def folder(self, kind: str) -> str:
        """Return the folder for this attempt's files of one kind."""
        return join(self.root, f"{kind}-{self.claim.attempt}")

    def find(self, *phases: str) -> tuple[str, Any] | None:
        """Return the last of the ordered `phases` that is finished and undamaged, and its output; remove other phases.

        Raises ClaimLostError, StorageError.
        """
        self.claim.require()
        for phase in reversed(phases):
            record = self._read(phase)
            if record is not None:
                self.needed = {f"{phase}.json", *record["folders"]}
                self.clear()
                return phase, record["left"]
        self.clear()
        return None

    def finish(self, phase: str, left: Any, kinds: Sequence[str]) -> None:
        """Record that `phase` is finished, with its output `left`; remove all folders except those of `kinds`.

        Raises ClaimLostError, StorageError.
        """
        own = [f"{kind}-{self.claim.attempt}" for kind in kinds]
        folders = {*own, *(name for name in self.needed if name.rpartition("-")[0] in kinds)}
        sizes = {name: storage.list_sizes(join(self.root, name)) for name in sorted(folders)}
        record = {"digest": self.digest, "folders": sizes, "left": left}
        self.claim.require()
        storage.write_sealed(join(self.root, f"{phase}.json"), json.dumps(record).encode(), durable=True)
        self.needed = {f"{phase}.json", *folders}
        self.clear()

    def clear(self) -> None:
        """Remove all files that no finished phase needs. Raises ClaimLostError, StorageError."""
        self.claim.require()
        for name in storage.list_names(self.root):
            if name not in self.needed:
                storage.remove(join(self.root, name), recursive=True)

    def _read(self, phase: str) -> Mapping[str, Any] | None:
        """Return the record of a phase; None if it is missing, belongs to other work, or a file has changed."""
        try:
            content = storage.read_sealed(join(self.root, f"{phase}.json"), remedy="The file is written again.")
            record: Mapping[str, Any] = json.loads(content)
        except (FileNotFoundError, TableError):
            return None
        if record["digest"] != self.digest:
            return None
        for name, sizes in record["folders"].items():
            listed = storage.list_sizes(join(self.root, name)) if sizes else {}
            if any(listed.get(file) != size for file, size in sizes.items()):
                return None
        return record


@dataclass(frozen=True)
class Finished:
    """Summaries of the phases up to `phase`. raw: summary of the first flow; later: summary of the later flows.

    frozen: the tokenizer, or None before the tokenizer is chosen.
    """

    phase: str
    raw: Summary
    later: Summary
    frozen: FrozenTokenizer | None = None


def find_finished(phases: Phases, inputs: Inputs, data: str, say: Progress) -> Finished | None:
    """Return the phases that an earlier run of the same work finished, if any; remove other files.

    Raises ClaimLostError, StorageError.
    """
    record = phases.find(*_DONE)
    if record is None:
        return None
    finished = as_json(Finished).validate_python(record[1])
    say(f"{data}: an earlier run was interrupted; checking whether INPUT has changed")
    if finished.raw.files != read_files(inputs):
        say(f"{data}: INPUT has changed; starting from the beginning")
        phases.find()
        return None
    say(f"{data}: resuming: {_DONE[finished.phase]}")
    return finished


def record_phase(phases: Phases, finished: Finished) -> None:
    """Record a finished phase and its output; remove its input, unless a later phase needs this input.

    Raises ClaimLostError, StorageError.
    """
    raw = replace(finished.raw, blocks=()) if finished.phase == TOKENIZED else finished.raw
    left = as_json(Finished).dump_python(replace(finished, raw=raw), mode="json")
    phases.finish(finished.phase, left, _NEEDED[finished.phase])


def check_rejects(inputs: Inputs, raw: Summary, summary: Summary, options: ShardOptions) -> None:
    """Raise InputError if too many rows of a table, or too many label mentions in the table's rows, are rejected.

    raw: the counts from the first flow. summary: the rejects so far. In a format without keys, no label may be
    rejected.
    """
    over, max_share, without = list[str](), options.max_reject_share, 0
    for table in dict.fromkeys(part.table for part in inputs.parts):
        reasons = summary.reasons(table)
        unknown = reasons.pop(Reason.UNKNOWN_LABEL.value, 0)
        if options.unlabelled == "skip":
            reasons.pop(Reason.NO_LABELS.value, None)
        without += reasons.get(Reason.NO_LABELS.value, 0)
        share = 0.0 if table == LABELS and not inputs.keyed else max_share
        for unit, n, of in (
            ("rows", sum(reasons.values()), raw.count_input(table, "rows_in")),
            ("label mentions", unknown, raw.count_input(table, "mentions")),
        ):
            if n > share * of:
                why = f" ({', '.join(f'{n:,} {reason}' for reason, n in reasons.items())})" if unit == "rows" else ""
                over.append(f"{n:,} of {of:,} {unit} of {inputs.shown(table)}{why}")
    if not over:
        return
    first = "".join(f"\n  {reject}" for reject in summary.rejects)
    ids = "" if inputs.keyed else " (a label's line number is its id, so no label may be rejected)"
    skip = f"leave out rows without labels with {option('unlabelled', 'skip')}, " if without else ""
    raise InputError(
        f"rejected {'; '.join(over)}. The first rejects are:{first}\nFix these rows, {skip}or raise "
        f"{option('max_reject_share')}, which is {max_share:g}{ids}."
    )


def write_tokenizer(data: str, tokenizer: FrozenTokenizer, parameters: Mapping[str, Any]) -> Manifest:
    """Write the tokenizer's files, and a copy for the workers; return the manifest, which is published later."""
    folder = DataLayout(data).tokenizer
    storage.write_sealed(tokenizer_url(data), tokenizer.files[FILE])
    entries = [manifests.write_file(folder, name, content) for name, content in sorted(tokenizer.files.items())]
    facts = {"vocabulary": tokenizer.vocabulary, "max_tokens": tokenizer.max_tokens, **parameters}
    return Manifest(kind="tokenizer", shards=tuple(entries), parameters=facts)


def publish(
    data: str,
    summary: Summary,
    tokenizer: Manifest | None,
    splits: Sequence[QueriesPlan],
    of_labels: LabelsPlan,
    rejects: Manifest,
    parameters: Mapping[str, Any],
) -> Manifest:
    """Publish tokenizer, queries, labels and rejects; then the data set, with `parameters` and the tables' digests.

    Raises StorageError.
    """
    layout, parents, facts = DataLayout(data), dict[str, str](), {"text": parameters["options"]["text"]}
    if tokenizer is not None:
        parents["tokenizer"] = manifests.publish(layout.tokenizer, tokenizer).digest
        facts = {**tokenizer.parameters, **facts}
    labels, origins = sum(shard.rows for shard in summary.shards_of(of_labels.name)), dict(parents)
    for plan in splits:
        own = {**facts, "labels": labels, "split": plan.split, "seed": parameters["options"]["seed"]}
        parents[plan.name] = manifests.publish(plan.table, describe_table(plan, summary, origins, own)).digest
    origins["queries/train"] = parents["queries/train"]
    facts["training_points"] = summary.counters["queries/train"]["rows_out"]
    described = describe_table(of_labels, summary, origins, facts)
    parents[of_labels.name] = manifests.publish(layout.labels, described).digest
    parents["rejects"] = manifests.publish(layout.rejects, rejects).digest
    return manifests.publish(data, Manifest(kind="data", parents=parents, parameters=dict(parameters)))


def describe_table(
    plan: QueriesPlan | LabelsPlan, summary: Summary, parents: dict[str, str], parameters: dict[str, Any]
) -> Manifest:
    """Return the manifest of the table that was written with `plan`."""
    kind = "labels" if plan.name == LABELS else "queries"
    rows = sum(shard.rows for shard in summary.shards_of(plan.name))
    counters = {**dict(sorted(summary.counters[plan.name].items())), "rejected": summary.reasons(plan.source)}
    request = Request(kind, parents, parameters)
    return describe(request, summary, plan.schema, plan.row_group_rows, (0, rows), plan.name, counters=counters)


def write_rejects(data: str, rejected: Sequence[tuple[str, Packet]], staged: FileExchange) -> Manifest:
    """Write the rejects, one shard per input table, ordered by file and line; return the unpublished manifest.

    The function groups rejects by range of lines with temporary files in `staged`, and sorts one range at a time.
    """
    by_table = dict(group_by_key(rejected))
    url, schema, shards = DataLayout(data).rejects, arrow.rejects(), []
    for number, table in enumerate(sorted(by_table)):
        with parquet.writing_shard(url, number, len(by_table), schema, _GROUP_ROWS) as shard:
            ranges = (part for batch in receive(by_table[table]) for part in _ranges(batch))
            for _, packets in sorted(group_by_key(send_together(staged, ranges))):
                shard.write(gather(packets, schema).sort_by([(name, "ascending") for name in schema.names]))
        shards.append(shard.entry)
    request = Request("rejects", None, {"tables": sorted(by_table)})
    return describe(request, Summary({request.kind: tuple(shards)}), schema, _GROUP_ROWS, None)


def _ranges(batch: pa.RecordBatch) -> Iterator[tuple[tuple[str, int], pa.RecordBatch]]:
    """Split rejects by file and range of lines."""
    files = batch["source"].dictionary_encode()
    names, number = files.dictionary.to_pylist(), files.indices.to_numpy().astype("int64")
    part = batch["line"].to_numpy() // _LINES
    stride = int(part.max(initial=0)) + 1
    for code, rows in split_by(batch, number * stride + part):
        yield (names[code // stride], code % stride), rows


def move_to_data(build: Build, manifest: Manifest) -> Manifest:
    """Move an attempt's data set to DATA: tables first, DATA's `manifest` last. Raises ClaimLostError, StorageError."""
    tables = {name: Table.open(join(build.url, name)) for name in manifest.parents}
    try:
        files = [f"{name}/{file}" for name, table in tables.items() for file in table.manifest.files]
        build.put(list(dict.fromkeys(files)))
        return build.publish(manifest, [f"{name}/{MANIFEST}" for name in tables])
    except BaseException:
        with contextlib.suppress(ClaimLostError, StorageError):  # the first error is the cause
            build.claim.require()
            clear(build.out)
        raise
