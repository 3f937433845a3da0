"""What a report is made of: statistics of the data, records of the run, queries."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from extremis.auto import AUTO_REPORT
from extremis.inspecting import LONGEST_LABEL, Example, TextDecoder, clean_text, read_examples, sharding_command
from extremis.summary import splits_of, summarize
from extremis.supervisor import read_commands
from pipelines.formats.base import say_names
from schemas import UNKNOWN, storage
from schemas.errors import ExtremisError, redact
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest
from schemas.shard_files.parquet import list_column, number_column
from schemas.storage import join, read_json
from schemas.table import RunTable, Table, run_tables
from scoring.fitting import KIND, open_fused, scores_of
from trainer.checkpoints import open_step
from trainer.evaluation.evaluate import label_statistics
from trainer.evaluation.ranking import nearest_labels, score_rows
from trainer.inputs import scored_columns
from trainer.methods.keys import flatten
from trainer.model import load_model, trained_digest, trained_labels
from trainer.recipe_files import load_config
from trainer.tracking import read_metrics

SAMPLED_GROUPS = 32  # row groups for histograms, spread evenly over a split
RANKS = 200  # points of the tail curve


@dataclass(frozen=True)
class SplitStatistics:
    """Statistics of a split: the numbers of tokens and labels of the sampled rows, [N] each; [0] without tokens."""

    name: str
    manifest: Manifest
    tokens: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class LabelTail:
    """Training points per label, with the most frequent label at rank 1: `points` [n] for the ranks `rank` [n]."""

    rank: np.ndarray
    points: np.ndarray
    labels: int
    unseen: int
    head_share: float  # share of all training pairs in the most frequent 1 % of the labels


@dataclass(frozen=True)
class DataStatistics:
    url: str
    manifest: Manifest
    splits: list[SplitStatistics]
    tail: LabelTail
    rejected: int
    command: str  # command that makes DATA
    counts: dict[str, dict[str, int]]  # counts of each split, as in `summarize`

    @property
    def files(self) -> str:
        return say_names(sorted(str(entry["file"]) for entry in self.manifest.parameters["input"].values()))


def describe(data: DataLayout) -> DataStatistics:
    """Describe DATA, from manifests, label frequencies and a sample of row groups. Raises TableError."""
    manifest, splits = Table.open(data.root, "data").manifest, []
    for name in splits_of(data):
        table = Table.open(data.queries(name), "queries")
        counts = {column: np.empty(0, np.int64) for column in ("input_ids", "label_ids")}
        columns, groups = [column for column in counts if column in table.columns], len(table.groups)
        sampled = np.unique(np.linspace(0, groups - 1, min(SAMPLED_GROUPS, groups)).astype(int)).tolist()
        for _, group in table.read_groups(sampled, columns):
            for column in columns:
                counts[column] = np.append(counts[column], list_column(group, column).counts)
        splits.append(SplitStatistics(name, table.manifest, *counts.values()))
    rejected = Table.open(data.rejects, "rejects").rows if manifest.parents.get("rejects") else 0
    facts = sharding_command(data.root, manifest), summarize(data.root)["splits"]
    frequency = number_column(Table.open(data.labels, "labels").read(("frequency",)), "frequency")
    return DataStatistics(data.root, manifest, splits, tail_of(frequency), rejected, *facts)


def histograms(counts: Sequence[np.ndarray], bins: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Count the rows of each of S arrays by value, in the same bins of equal width, at most `bins`.

    Returns (lower end [n], rows [S, n]).
    """
    values = np.concatenate(counts)
    if not len(values):
        return np.empty(0, np.int64), np.empty((len(counts), 0), np.int64)
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // bins)
    ends = low + width * np.arange((high - low) // width + 1)
    return ends, np.stack([np.bincount((each - low) // width, minlength=len(ends)) for each in counts])


def tail_of(frequency: np.ndarray) -> LabelTail:
    """Sample the frequencies [L] of trained labels at RANKS ranks, evenly spaced on a logarithmic scale."""
    points, head = np.sort(frequency[frequency > 0])[::-1], max(1, len(frequency) // 100)
    rank = np.unique(np.geomspace(1, len(points), RANKS).round().astype(np.int64)) if len(points) else points
    share = float(points[:head].sum() / max(1, points.sum()))
    return LabelTail(rank, points[rank - 1], len(frequency), len(frequency) - len(points), share)


SHOWN_METRICS = ("P@1", "P@5", "nDCG@5", "R@5", "PSP@1", "PSP@5")  # the same k in all tables
CURVE_POINTS = 1000  # maximum of points of a curve; longer curves are averaged
_FUSED_SCORES = {"texts": "labels' texts", "votes": "votes of training points", "linear": "linear ranker"}


class RepresentativeScores(NamedTuple):
    """The step and the kind of scores that represent a run; `fusion`: results of the fit if scores are fused."""

    step: int
    scores: str
    fusion: Mapping[str, Any]

    @property
    def formula(self) -> str:
        weights = [(self.fusion.get(field), name) for field, name in _FUSED_SCORES.items()]
        added = " + ".join(["vectors", *(f"{weight:.2f} × {name}" for weight, name in weights if weight)])
        return (
            f"boosted trees over {added}, nearest texts and labels' names"
            if self.fusion.get("by") == "trees"
            else added
        )


@dataclass(frozen=True)
class Run:
    """Information about a run for the page; the name consists of path and recipe."""

    name: str
    layout: RunLayout
    config: dict[str, Any]
    records: dict[str, list[dict[str, Any]]]  # by kind
    tables: list[RunTable]  # by source, oldest first
    evaluations: dict[str, dict[str, Any]]  # by split
    finished: bool
    commands: list[str]  # command lines that made the run
    commits: list[str]  # of the code that they ran, each once
    representative: RepresentativeScores | None  # None: no checkpoint yet
    auto: dict[str, Any] | None  # record of `auto`, if it made the run

    def curve(self, kind: str, name: str, over: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (step or epoch [n], value [n]) from records of `kind` with a number `name`; n <= CURVE_POINTS."""
        rows = [row for row in self.records.get(kind, []) if isinstance(row.get(name), int | float)]
        steps, values = (np.asarray([row[field] for row in rows]) for field in (over, name))
        return downsample(steps, values.astype(float), CURVE_POINTS)


def ordered_splits(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (name == "train", name != "test", name))


def say_split(split: str) -> str:
    """Return the name of a split for a heading; the metrics of train are marked."""
    return f"{split} (training queries, not a test)" if split == "train" else split


def open_run(url: str, name: str, data: Manifest | None = None) -> Run:
    """Read the run at `url`, with evaluations on `data` (default: the run's own data); add the recipe to `name`.

    Raises InputError if there is no run, or if the config cannot be read.
    """
    layout = RunLayout(url)
    config = load_config(layout.config)
    later = data.digest if data is not None and trained_digest(config) != data.digest else None
    recipe, checkpoint = config.get("recipe", {}), open_step(layout, layout.scored_step())
    folder = layout.evaluations_on(later)
    files = [join(folder, name) for name in storage.list_names(folder) if name.endswith(".json")]
    bodies = [{**read_json(file), "file": file} for file in files]
    scored = None if checkpoint is None else checkpoint.step
    # The last evaluation of a split counts: that of the representative checkpoint, else the newest.
    bodies.sort(key=lambda body: (body["split"], body["step"] == scored, body["step"]))
    representative, auto = None, join(layout.root, AUTO_REPORT)
    commands, commits = read_commands(layout)
    began = config.get("versions", {}).get("commit", UNKNOWN)
    if checkpoint is not None:
        step, scores = checkpoint.step, scores_of(url, checkpoint.step)
        fusion = Table.open(layout.fusion(step), KIND).parameters if scores == "fused" else {}
        representative = RepresentativeScores(step, scores, fusion)
    records: dict[str, list[dict[str, Any]]] = {}
    for record in read_metrics(layout):
        records.setdefault(str(record.get("kind")), []).append(record)
    return Run(
        f"{name} ({recipe.get('name') or recipe.get('method')})",
        layout,
        config,
        records,
        sorted(run_tables(layout), key=lambda table: (table.source, table.epoch)),
        {body["split"]: body for body in bodies},
        storage.exists(layout.finished),
        commands,
        list(dict.fromkeys([began, *commits])),
        representative,
        read_json(auto) if storage.exists(auto) else None,
    )


def names_of(urls: Sequence[str]) -> list[str]:
    """Return a short, unique name for each run: the last two parts of the URL, or more parts if necessary."""
    parts = [redact(url).rstrip("/").split("/") for url in urls]
    for length in range(2, max(2, *map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [redact(url) for url in urls]


def recipe_differences(configs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """List the recipe keys whose values differ between runs: (dotted key, value in each run)."""
    flat = [flatten(config.get("recipe", {})) for config in configs.values()]
    keys = sorted({key for values in flat for key in values})
    rows = [(key, [values.get(key) for values in flat]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def downsample(steps: np.ndarray, values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Reduce a curve to at most `most` points: the mean of each group of neighbours, at the group's last step."""
    if len(values) <= most:
        return steps, values
    edges = np.linspace(0, len(values), most + 1).astype(int)
    return steps[edges[1:] - 1], np.add.reduceat(values, edges[:-1]) / np.diff(edges)


def plain_values(values: Iterable[Any]) -> list[Any]:
    """Convert values for JSON: 5 significant digits, which are enough for a screen, and NaN as null."""
    plain = values.tolist() if isinstance(values, np.ndarray) else values
    return [(float(f"{v:.5g}") if np.isfinite(v) else None) if isinstance(v, float) else v for v in plain]


def evaluated_splits(runs: Iterable[Run]) -> list[str]:
    return ordered_splits({split for run in runs for split in run.evaluations})


def metric_tables(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Make a table per evaluated split, test first: one row per run, and the best of each metric on equal queries.

    A row is a run's evaluation, with the run's name and colour number. Baselines come last, without a colour. `parts`:
    run, "seen" or "unseen", and evaluation of these queries.
    """
    tables = []
    for split in evaluated_splits(runs):
        numbered = [(number, run) for number, run in enumerate(runs) if split in run.evaluations]
        rows = [{**run.evaluations[split], "run": run.name, "color": number} for number, run in numbered]
        names = [name for name in SHOWN_METRICS if any(name in row["metrics"] for row in rows)]
        is_comparable = len(rows) > 1 and len({row["queries"] for row in rows}) == 1
        best = {name: max(row["metrics"].get(name, -np.inf) for row in rows) for name in names if is_comparable}
        parts = [(row["run"], part, row.get(part, {})) for row in rows for part in ("seen", "unseen")]
        baselines: dict[str, dict[str, Any]] = {}
        for row in rows:
            for name, metrics in row.get("baselines", {}).items():
                queries = row["beside_baselines"]["queries"]
                baselines.setdefault(name, {"run": name, "queries": queries, "metrics": metrics})
        tables.append(
            {
                "split": split,
                "title": say_split(split),
                "names": names,
                "rows": [*rows, *baselines.values()],
                "best": best,
                "decided": [
                    (row["run"], row["at_decision"], *mean)
                    for row in rows
                    for mean in (("queries", "samples"), ("all pairs (micro)", "micro"), ("labels (macro)", "macro"))
                ],
                "calibrated": [(row["run"], row["calibration"]) for row in rows if "calibration" in row],
                "parts": [part for part in parts if "metrics" in part[2]],
                "seen": max((row["seen"]["queries"] for row in rows if "seen" in row), default=None),
            }
        )
    return tables


QUERY_CHARACTERS = 160  # characters of a query
GROUPS = 20  # groups of weakest queries, one per text


def list_weakest(data: DataLayout, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return {"run", "split", "title", "k", "queries"} for each evaluation with weakest queries, test first.

    Queries are groups from `group_queries`. Raises TableError.
    """
    decoder, tables = TextDecoder(data), []
    for split in (split for split in evaluated_splits(runs) if split in splits_of(data)):
        for run in (run for run in runs if run.evaluations.get(split, {}).get("weakest")):
            body = run.evaluations[split]["weakest"]
            rows = np.asarray(sorted(row for row, _, _ in body["queries"]), np.int64)
            examples = {example.row: example for example in read_examples(data, split, rows, decoder, None)}
            queries = group_queries([(examples[row], found, positives) for row, found, positives in body["queries"]])
            facts = {"run": run.name, "split": split, "title": say_split(split), "k": body["k"]}
            tables.append({**facts, "queries": queries[:GROUPS]})
    return tables


def group_queries(counted: Sequence[tuple[Example, int, int]]) -> list[dict[str, Any]]:
    """Group (query, number of found positives, number of positives) by text, in order of first occurrence.

    A group is {"text", "keys", "rows", "found", "positives"}; a truncated text forms a group of its own.
    """
    groups: dict[tuple[str, int | None], dict[str, Any]] = {}
    for query, found, positives in counted:
        same = query.text, query.row if query.text.endswith("…") else None
        text = clean_text(query.text, QUERY_CHARACTERS)
        group = groups.setdefault(same, {"text": text, "keys": [], "rows": [], "found": 0, "positives": 0})
        group["keys"].append(query.key)
        group["rows"].append(query.row)
        group["found"] += found
        group["positives"] += positives
    return list(groups.values())


PREDICTIONS = 10
NEGATIVES = 20  # best negatives shown of a table's K
LABELS_WITH_NEIGHBOURS = 500  # maximum of labels with a list of nearest labels

Scores: TypeAlias = dict[tuple[str, int], dict[int, float]]  # score by (split, row) and label
Near: TypeAlias = dict[int, list[tuple[int, float]]]  # nearest labels and their cosines, by label


class Label(NamedTuple):
    """A label's text (or key), key, and number of training points; `shared`: other labels have the same text."""

    text: str
    key: str
    points: int
    shared: bool


def name_labels(decoder: TextDecoder, ids: Iterable[int]) -> dict[int, Label]:
    """Return labels by id. If labels share a text, the page also shows their keys. Raises TableError."""
    named = {row["label_id"]: (clean_text(str(row["key"])), row) for row in decoder.label_rows(ids)}
    texts = {label: clean_text(row["text"], LONGEST_LABEL) or key for label, (key, row) in named.items()}
    labels = Counter(texts.values())
    return {i: Label(texts[i], key, row["frequency"], labels[texts[i]] > 1) for i, (key, row) in named.items()}


class Sample(NamedTuple):
    """Queries, labels by id, the nearest labels of each label for each run, and notes on missing parts."""

    queries: list[dict[str, Any]]
    labels: dict[int, Label]
    near: list[Near]
    notes: list[str]


def sample_rows(rows: int, count: int) -> np.ndarray:
    """Choose `count` rows in [0, rows), or all rows, in a few evenly spread ranges, so that few row groups are read.

    Rows are ordered by a hash of the key, so that a range is a random sample. Returns int64, ascending.
    """
    count = min(rows, count)
    edges = np.linspace(0, count, min(16, count) + 1).astype(np.int64)
    starts = edges[:-1] * rows // max(1, count)
    return np.arange(count) + np.repeat(starts - edges[:-1], np.diff(edges))


def sample_queries(
    data: DataLayout,
    runs: list[Run],
    splits: list[str],
    count: int,
    predict: bool,
    tables: Sequence[Mapping[str, Any]] = (),
) -> Sample:
    """Read about `count` queries, equally many from each of `splits`, with the runs' negatives and predictions.

    The sample contains the first query of each group in `tables` (from `list_weakest`). A run that cannot predict (no
    checkpoint yet) has no predictions, but a note. Raises TableError.
    """
    decoder = TextDecoder(data)
    notes: list[str] = []
    by_run: dict[str, list[Example]] = {run.name: [] for run in runs}
    groups = [(shown["split"], group) for shown in tables for group in shown["queries"]]
    weak = {split: {group["rows"][0] for of, group in groups if of == split} for split in splits}
    for split in splits:
        table = Table.open(data.queries(split), "queries")
        sampled = sample_rows(table.rows, -(-count // len(splits)))
        first = np.asarray(sorted(weak[split]), np.int64)[: len(sampled)]
        others = np.setdiff1d(sampled, first)[: len(sampled) - len(first)]  # keeps the total at the sample size
        rows = np.union1d(first, others)
        for run in runs:
            by_run[run.name] += read_examples(data, split, rows, decoder, run.layout)
    examples = [example for examples in by_run.values() for example in examples]
    for example in examples:
        example.negatives = example.negatives[:NEGATIVES]
    frequent = Counter(label for example in examples for label in example.positives).most_common()
    label_ids = [label for label, _ in frequent[:LABELS_WITH_NEIGHBOURS]]
    scores: dict[str, Scores] = {run.name: {} for run in runs}
    near: dict[str, Near] = {run.name: {} for run in runs}
    for run in runs if predict else []:
        try:
            scores[run.name], near[run.name] = _score(data, run, by_run[run.name], label_ids)
        except ExtremisError as error:
            notes.append(f"{run.name}: no predictions. {error}")
    named = [label for example in examples for label in example.label_ids]
    found = [label for nearest in near.values() for row in nearest.values() for label, _ in row]
    labels = name_labels(decoder, [*named, *found])
    described = (_describe(examples, list(scores.values())) for examples in zip(*by_run.values(), strict=True))
    queries = [{**query, "weak": query["row"] in weak[query["split"]]} for query in described]
    return Sample(queries, labels, list(near.values()), notes)


def _score(data: DataLayout, run: Run, examples: list[Example], label_ids: list[int]) -> tuple[Scores, Near]:
    """Add predictions to `examples`; return scores of all positives and negatives, and neighbours of `label_ids`.

    All results are computed with the checkpoint and the kind of scores that represent the run.
    """
    _, model, checkpoint = load_model(data, run.layout, run.layout.scored_step(), earlier=True)
    trained, root = trained_labels(model, checkpoint), run.layout.root
    candidates = replace(label_statistics(data), trained_labels=trained).candidates()
    assert run.representative is not None, "it has a checkpoint"
    scores: Scores = {}
    for split in dict.fromkeys(example.split for example in examples):
        part = [example for example in examples if example.split == split]
        queries = Table.open(data.queries(split), "queries")
        rows = queries.rows_at(np.asarray([example.row for example in part]), scored_columns(queries, model.columns))
        fused = open_fused(data.root, root, checkpoint, model, split) if run.representative.scores == "fused" else None
        named = [[*example.positives, *(label for label, _ in example.negatives)] for example in part]
        if trained is not None:
            named = [[label for label in labels if label < trained] for labels in named]
        best, top, named_scores = score_rows(model, rows, named, PREDICTIONS, candidates, fused)
        for example, row_best, row_top in zip(part, best.tolist(), top.tolist(), strict=True):
            example.predictions = [pair for pair in zip(row_top, row_best, strict=True) if pair[0] >= 0]
        for example, row_labels, row_scores in zip(part, named, named_scores, strict=True):
            scores[split, example.row] = dict(zip(row_labels, row_scores, strict=True))
    return scores, nearest_labels(model.head.vectors[:trained, : model.encoder.dimension], label_ids)


def _describe(examples: tuple[Example, ...], scores: list[Scores]) -> dict[str, Any]:
    """Describe one query for the page, with a view per run. Scores come from the run's checkpoint, else its table."""

    def rounded(score: float) -> float:
        return float(f"{score:.4g}")

    query, views = examples[0], []
    for example, by_row in zip(examples, scores, strict=True):
        own = by_row.get((query.split, query.row), {})
        weakest = min((own[label] for label in example.positives if label in own), default=None)
        negatives = [
            [label, rounded(own[label] if own else mined_score), weakest is not None and own[label] > weakest]
            for label, mined_score in example.negatives
        ]
        views.append(
            {
                "positives": [rounded(own[label]) if label in own else None for label in example.positives],
                "predictions": [[label, rounded(score)] for label, score in example.predictions],
                "negatives": negatives,
                "suspects": sum(suspect for _, _, suspect in negatives),
                "hit": example.predictions[0][0] in example.positives if example.predictions else None,
            }
        )
    return {**{name: getattr(query, name) for name in ("split", "row", "key", "text", "positives")}, "runs": views}
