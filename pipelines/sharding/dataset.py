"""The data set as a whole: what is at DATA already, and the manifests that make a new one visible, DATA's own last."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.sharding.plans import LabelsPlan, QueriesPlan
from pipelines.sharding.rejects import Rejects
from pipelines.sharding.summary import Summary
from pipelines.sharding.tokenizer import FrozenTokenizer
from schemas import manifest as manifests
from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout
from schemas.manifest import Manifest, Shard, columns_of
from schemas.storage import join

_OURS = ("queries", "labels", "tokenizer")
_HOW = "Give another DATA, or --overwrite to replace it."


def find_finished(data: str, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Manifest | None:
    """The data set at `data` if it was made from `inputs` with `options`; None where there is none.

    Raises InputError: made otherwise; TableError: damaged.
    """
    if not manifests.is_published(data):
        return None
    found = manifests.open_manifest(data, "data")
    for what, now in (("input", inputs), ("options", options)):
        then = found.parameters.get(what, {})
        for name in sorted({*then, *now}):
            if then.get(name) != now.get(name):
                raise InputError(
                    f"{data}: holds a data set made with other {what}: {name} was {_brief(then.get(name))}, "
                    f"now it is {_brief(now.get(name))}. {_HOW}"
                )
    for table, digest in found.parents.items():
        if manifests.open_manifest(join(data, table)).digest != digest:
            raise TableError(f"{join(data, table)}: not the table that {data} was published with. {_HOW}")
    return found


def begin(data: str) -> None:
    """Clear what an earlier attempt left at `data`, and mark this one. Raises InputError: files there are not ours."""
    layout = DataLayout(data)
    present = [name for name in storage.list_names(data) if name in _OURS]
    if present and not manifests.is_published(data) and not storage.list_names(layout.staging):
        raise InputError(
            f"{data}: holds {', '.join(present)}, but neither a data set nor an unfinished one. "
            "It is left alone; give another DATA, or move them away."
        )
    clear(data)
    storage.write_bytes(join(layout.staging, "attempt.json"), b"{}\n")


def clear(data: str) -> None:
    """Remove the data set at `data`, finished or not: invisible first, the attempt's mark last."""
    manifests.unpublish(data)
    for name in _OURS:
        storage.remove(join(data, name), recursive=True)
    end(data)


def end(data: str) -> None:
    """Remove the attempt's mark and summary."""
    storage.remove(DataLayout(data).staging, recursive=True)


def write_tokenizer(data: str, tokenizer: FrozenTokenizer) -> tuple[Shard, ...]:
    """Write the tokenizer's files, which the workers load; they are published with the rest."""
    entries = []
    for name, content in sorted(tokenizer.files.items()):
        storage.write_bytes(join(DataLayout(data).tokenizer, name), content)
        entries.append(Shard(path=name, rows=0, bytes=len(content), sha256=storage.sha256(content)))
    return tuple(entries)


def check_rejects(rejects: Rejects, splits: Sequence[QueriesPlan], of_labels: LabelsPlan, max_share: float) -> None:
    """Raise one InputError when more than `max_share` of a split's lines, or any label, is rejected."""
    shares = [(plan.file, plan.rows, max_share) for plan in splits] + [(of_labels.file, of_labels.labels, 0.0)]
    over = [(file, rows) for file, rows, share in shares if rejects.total(file) > share * rows]
    if not over:
        return
    counts = "; ".join(
        f"{rejects.total(file):,} of {rows:,} lines of {file} "
        f"({', '.join(f'{n:,} {reason}' for reason, n in rejects.by_reason(file).items())})"
        for file, rows in over
    )
    first = "".join(f"\n  {reject}" for reject in rejects.first)
    raise InputError(
        f"rejected {counts}. The first are:{first}\nMend these lines; or raise --max-reject-share, which is "
        f"{max_share:g} of each split (a label's line is its id, so no label may be rejected)."
    )


def publish(
    data: str,
    summary: Summary,
    tokenizer: Manifest,
    splits: Sequence[QueriesPlan],
    of_labels: LabelsPlan,
    parameters: Mapping[str, Any],
) -> Manifest:
    """Publish tokenizer, queries, labels, and last the data set of `parameters`, their parent. Raises StorageError."""
    layout = DataLayout(data)
    parents = {"tokenizer": manifests.publish(layout.tokenizer, tokenizer).digest}
    for plan in splits:
        made = _queries(plan, summary, parents["tokenizer"], tokenizer.parameters)
        parents[plan.name] = manifests.publish(plan.table, made).digest
    made = _labels(of_labels, summary, parents, tokenizer.parameters)
    parents[of_labels.name] = manifests.publish(layout.labels, made).digest
    return manifests.publish(data, Manifest(kind="data", parents=parents, parameters=dict(parameters)))


def _queries(plan: QueriesPlan, summary: Summary, tokenizer: str, parameters: Mapping[str, Any]) -> Manifest:
    shards = summary.shards_of(plan.name)
    rows = sum(shard.rows for shard in shards)
    return Manifest(
        kind="queries",
        columns=columns_of(plan.schema),
        shards=shards,
        rows=rows,
        row_group_rows=plan.row_group_rows,
        id_range=(0, rows),
        parents={"tokenizer": tokenizer},
        parameters={**parameters, "split": plan.split, "labels": plan.labels, "seed": plan.seed, "text": plan.text},
        counters=_counters(plan.name, plan.file, summary),
    )


def _labels(plan: LabelsPlan, summary: Summary, parents: Mapping[str, str], parameters: Mapping[str, Any]) -> Manifest:
    training_points = summary.counters["queries/train"]["rows_out"]
    return Manifest(
        kind="labels",
        columns=columns_of(plan.schema),
        shards=summary.shards_of(plan.name),
        rows=plan.labels,
        row_group_rows=plan.row_group_rows,
        id_range=(0, plan.labels),
        parents={name: parents[name] for name in ("tokenizer", "queries/train")},
        parameters={**parameters, "training_points": training_points, "text": plan.text},
        counters=_counters(plan.name, plan.file, summary),
    )


def _counters(table: str, file: str, summary: Summary) -> dict[str, Any]:
    # The rejected lines themselves are counted only; a table of them would be published beside this one.
    return {**dict(sorted(summary.counters[table].items())), "rejected": summary.rejects.by_reason(file)}


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{value.get('file')} ({value.get('bytes')} bytes, SHA-256 {str(value.get('sha256'))[:12]}…)"
    return "not there" if value is None else repr(value)
