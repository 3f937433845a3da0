"""Functions up to a trained run: shard, data, run, train, mine, merge, teach, cluster, recipes, plan.

Heavy modules are imported when a function is called, so that help and a typo are quick.
"""

import contextlib
import json
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from extremis.console import output, say
from extremis.function import (
    COMMAS,
    BeamOptions,
    NotNegative,
    Place,
    PlaceOrData,
    Positive,
    Progress,
    Recipe,
    Settings,
    Size,
    Spelled,
    StartTimeout,
    function,
)
from extremis.result import Grid, Result
from extremis.stopping import GRACE
from pipelines.options import ArrayOptions, ClusterOptions, MergeOptions, MineOptions, ShardOptions, TeachOptions
from schemas.errors import InputError, StorageError, option
from schemas.logs import about
from schemas.options import AnyDevice, Device, Options, Shown
from schemas.options import Place as PlaceText
from schemas.process import limit_openmp_threads

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from extremis.fields import ArrayFields, ClusterFields, MergeFields, ShardFields, TeachFields, TrainFields
    from schemas.manifest import Manifest


def _pair(value: Any) -> Any:
    parts = value.split(",") if isinstance(value, str) else value
    if len(parts) != 2:
        raise PydanticCustomError("pair", "input should be two numbers A,B, for example 0.55,1.5")
    return parts


_MetricsPort = Annotated[int, Field(ge=0, le=65535, description="Port that serves metrics for Prometheus. 0: any.")]
_MetricsHost = Annotated[str, Field(description="Address that the metrics port listens on.")]


def _metrics(host: str, port: int | None) -> contextlib.AbstractContextManager[int | None]:
    from extremis.metrics import serve_metrics

    return serve_metrics(None if port is None else (host, port), say)


@dataclass(frozen=True, repr=False, kw_only=True)
class ShardResult(Result):
    """DATA, with digests by `tables`, and counts; `rows` by split."""

    data: str
    digest: str
    tables: Mapping[str, str]
    rows: Mapping[str, int]
    labels: int
    summary: Mapping[str, object]


@function
def shard(
    input: PlaceOrData,
    data: Place,
    options: ShardOptions | None = None,
    *,
    propensity: Annotated[tuple[float, float], BeforeValidator(_pair), Shown("A,B")] | None = None,
    overwrite: bool = False,
    metrics_port: _MetricsPort | None = None,
    metrics_host: _MetricsHost = "127.0.0.1",
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
    **fields: "Unpack[ShardFields]",
) -> ShardResult:
    """Tokenize and shard raw data from INPUT to DATA.

    INPUT is a folder or URL with files in a format from docs/formats.md, or a pattern such as raw/*-2024.jsonl: * and ?
    are wildcards unless a file or folder has exactly this name.
    In Python, INPUT may also be rows (dictionaries, or pairs of text and label), an Arrow table, a pandas data frame or
    a Hugging Face data set, or a dictionary with one of these for each split ("train", "test", "labels").
    Unusable rows go to DATA/rejects. Rows with an empty text are kept; rows without a text are rejected. Options after
    -- are passed to Beam. By default, shard uses all cores of this machine.

    Options:
        propensity: Propensity constants, e.g. 0.55,1.5. Default: none, so that there are no PSP metrics.
        overwrite: Replace any finished data set, and start from the beginning.

    Examples:
      extremis shard examples/tate/ data/ --propensity 0.55,1.5
      extremis shard queries/ data/ --format jsonl --fields key=id,text=query,labels=positives
      extremis shard raw/2026-11-20/ data/2026-11-20/ --onto data/2026-11-19/ --part 2026-11-20
      extremis shard raw/ data/ --embed sentence-transformers/all-MiniLM-L6-v2
      extremis shard s3://bucket/raw s3://bucket/data -- --runner=FlinkRunner --flink_master=host:8081
    """
    from extremis.summary import summarize, summary_lines
    from pipelines import shard as sharding
    from scoring.containers import input_url

    options, data = options or ShardOptions(), fspath(data)
    if propensity is not None:
        options = options.model_copy(update={"propensity_a": propensity[0], "propensity_b": propensity[1]})
    with input_url(input) as url, _metrics(metrics_host, metrics_port):
        manifest = sharding.shard(url, data, options, beam_options, say, overwrite=overwrite)
    summary = summarize(data)
    for line in summary_lines(data, summary):
        say(line)
    say(f"next: extremis run auto {data} {'RUN' if options.onto is None else 'RUN2 --from RUN1'}")
    facts = {"digest": manifest.digest, "tables": manifest.parents, "summary": summary}
    return ShardResult.of({**manifest.parameters, **facts}, data=data)


@dataclass(frozen=True, repr=False, kw_only=True)
class DataResult(Result):
    """Versions and exports in a folder (`list`), the parts of a version (`show`), or what was dropped (`drop`)."""

    versions: Sequence[Mapping[str, object]] | None = None
    exports: Sequence[Mapping[str, object]] | None = None
    parts: Sequence[Mapping[str, object]] | None = None


@function
def data(action: Literal["list", "show", "drop"], place: Place, *, progress: Progress = True) -> DataResult:
    """List data versions and exports in a folder, show the parts of a version, or drop a version or an export.

    list shows the part that each version adds, total rows and labels, and missing files. For exports, list also shows
    which export is current. show lists the parts of a data version. drop removes a data set or an export, unless
    another data set or export in the same folder needs its files, or the export is current.

    Examples:
      extremis data list data/
      extremis data show data/2026-11-20/
      extremis data drop data/2026-11-01/
      extremis data list exports/
    """
    from extremis import retention, versioning

    place = fspath(place)
    if action == "list":
        versions, exports, current, shown = versioning.list_all(place)
        if not shown:
            say(f"{place}: no data sets or exports here")
        return DataResult(versions=versions, exports=exports, more={"current": current}, shown=shown)
    if action == "show":
        facts, parts, shown = versioning.show(place)
        return DataResult(parts=parts, more=facts, shown=shown)
    return DataResult(more=retention.drop(place))


@dataclass(frozen=True, repr=False, kw_only=True)
class StatusResult(Result):
    """Runs, data sets and other tables, each with its state, progress, processes and bytes by kind."""

    outputs: Sequence[Mapping[str, object]]


@function
def status(place: Place, *, progress: Progress = True) -> StatusResult:
    """Show who is at work on a run, a data set or a folder of them, how far they are, and what they wait for.

    A process gives a heartbeat every 2 seconds. After 30 seconds without one it is silent: it was paused, or killed, or
    cannot reach storage. A dead process is known on its own machine only. An output is stopped if it is unfinished,
    and nobody owns it. Ages compare the clocks of two machines.

    Examples:
      extremis status runs/1
      extremis status s3://bucket/runs --json
    """
    from extremis.at_work import look

    outputs, shown = look(fspath(place))
    return StatusResult(outputs=outputs, shown=shown)


@dataclass(frozen=True, repr=False, kw_only=True)
class CleanResult(Result):
    """What was removed, or with dry_run would be: `names` below `place`; and `bytes` by kind."""

    removed: Sequence[Mapping[str, object]]
    bytes: Mapping[str, int]
    dry_run: bool


@function
def clean(
    place: Place,
    *,
    keep: Positive | None = None,
    older_than: Annotated[str, Shown("TIME")] = "7d",
    dry_run: bool = False,
    progress: Progress = True,
) -> CleanResult:
    """Remove what nobody needs of runs, data sets and exports at PLACE, or in folders below.

    Of a run: dumps and tables of hard negatives or clusters that no kept checkpoint, resumed run or miner needs. In a
    folder of versions: older versions of data that no other version needs, parts that no version names, and exports
    that were current earlier. Everywhere: files of ended processes. What a process writes or reads is kept; a process
    that reads an export, or a trainer that reads data, says so if it cannot write there.

    Options:
        keep: Newest tables of a run, and newest versions of a data set, to keep. Default: 1, or a run's refresh.keep.
        older_than: Keep versions, parts and files of ended processes that are younger, and exports that were current
            since.
        dry_run: Show what would be removed, and remove nothing.

    Examples:
      extremis clean runs/1
      extremis clean s3://bucket/exports --older-than 30d --dry-run
    """
    from extremis.retention import find_unneeded, remove
    from schemas.sizes import parse_seconds, say_bytes

    seconds = parse_seconds(older_than, option("older_than", older_than))
    found = find_unneeded(fspath(place), keep, seconds)
    found = found if dry_run else remove(found)
    sizes = Counter[str]()
    for each in found:
        say(str(each))
        sizes[each.kind] += each.size
    grid = Grid(
        "not needed" if dry_run else "removed", ["kind", "bytes"], [[k, say_bytes(n)] for k, n in sizes.items()]
    )
    removed = [{"place": each.root, "kind": each.kind, "names": each.names, "bytes": each.size} for each in found]
    return CleanResult(removed=removed, bytes=sizes, dry_run=dry_run, shown=[grid] if found else ["nothing to remove"])


@dataclass(frozen=True, repr=False, kw_only=True)
class TrainResult(Result):
    """RUN, its epochs, and by epoch the epoch whose dump the table is mined from; None: no table."""

    run: str
    epochs: Sequence[Mapping[str, object]]
    table_versions: Mapping[str, int | None]


class TrainOptions(Options):
    """Options of `extremis train` and `run`."""

    set: Settings = ()
    from_run: Annotated[PlaceText, Shown("RUN1", place=True)] | None = Field(
        None, description="Start from the encoder and the label vectors of RUN1, a run on an earlier version of DATA."
    )
    device: Device | None = Field(
        None,
        description="Device to use. Default: as in the recipe; usually auto, which takes a GPU if the machine has one.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="Number of threads; the miner uses the same number. Default: the cores that this process may use.",
    )
    resume: bool = Field(
        False,
        description="Continue from the newest checkpoint of RUN. Without a checkpoint, start from the beginning.",
    )
    grace: float = Field(
        GRACE,
        ge=0,
        description="Seconds for a checkpoint after SIGTERM or SIGHUP; Ctrl-C has no limit. 0: end at once.",
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Port that serves metrics for Prometheus. 0: any free port."
    )
    metrics_host: str = Field("127.0.0.1", description="Address that the metrics port listens on.")

    def overrides(self) -> tuple[str, ...]:
        """Return the changes to the recipe; also set the threads of this process."""
        if self.threads is not None:
            limit_openmp_threads(self.threads)
        keys = {"train.device": self.device, "train.threads": self.threads, "train.start_from": self.from_run}
        return (*self.set, *_stated(keys))

    def process(self) -> dict[str, Any]:
        """Return what does not affect the results of the run."""
        metrics = None if self.metrics_port is None else (self.metrics_host, self.metrics_port)
        return {"resume": self.resume, "grace": self.grace, "metrics": metrics}


@function
def train(
    recipe: Recipe,
    data: Place,
    run: Place,
    options: TrainOptions | None = None,
    *,
    progress: Progress = True,
    **fields: "Unpack[TrainFields]",
) -> TrainResult:
    """Train RECIPE on DATA, and write the results to RUN. This starts no miner, but a miner may run elsewhere.

    RECIPE is a name (see `extremis recipes`) or a TOML file.

    Examples:
      extremis train astra data/ runs/1 --set train.epochs=30
      extremis train astra data/ runs/1 --resume
      extremis train astra data/2/ runs/2 --from runs/1
      torchrun --nproc-per-node 2 -m extremis train astra data/ runs/1
    """
    options = options or TrainOptions()
    return _train(fspath(recipe), fspath(data), fspath(run), options.overrides(), None, options.process())


@function
def run(
    recipe: Recipe,
    data: Place,
    run: Place,
    options: TrainOptions | None = None,
    *,
    minutes: Annotated[float, Field(ge=0.1)] | None = None,
    pretrained: Annotated[Place, Shown("MODEL")] | None = None,
    deterministic: bool = False,
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
    **fields: "Unpack[TrainFields]",
) -> TrainResult:
    """Train RECIPE on DATA, with a miner process next to the trainer, and write the results to RUN.

    RECIPE is a name (see `extremis recipes`) or a TOML file. `auto` tries a few recipes on part of DATA, trains the
    best recipe, and learns to combine its scores with scores of label texts, nearby training points and a linear
    ranker. With --from RUN1, `auto` continues with the recipe of RUN1, without trials.

    If a table of hard negatives is late, a later epoch uses the table, unless the recipe waits for tables
    (refresh.stale = "wait"). Options after -- are passed to the miner's Beam pipeline.

    Options:
        minutes: With `auto`: limit for the total time. One trial, and two epochs of the chosen recipe, take place even
            if this takes longer. Default: no limit.
        pretrained: With `auto`: also try the token vectors of this model (a directory or hub name), which must have the
            same tokenizer as DATA.
        deterministic: Wait for each table, so that two runs with the same {threads} write the same bytes.

    Examples:
      extremis run auto data/ runs/1 --minutes 10
      extremis run astra data/ runs/2 --set train.epochs=20
      extremis run auto data/2026-11-20/ runs/2026-11-20 --from runs/2026-11-19
    """
    began = time.perf_counter()  # PyTorch takes seconds to load
    recipe, data, run, options = fspath(recipe), fspath(data), fspath(run), options or TrainOptions()
    overrides, process = options.overrides(), options.process()
    from trainer.recipe_files import WAIT_FOR_TABLES, applicable_overrides

    if deterministic and minutes is not None:
        raise InputError(
            f"{option('minutes')} stops by the clock, so its result cannot be {option('deterministic', True)}. Give "
            "only one of the two."
        )
    if recipe != "auto":
        if minutes is not None:
            instead = option("set", {"train.minutes": minutes})
            raise InputError(f"{option('minutes')} works only with the recipe auto. For another one give {instead}.")
        if pretrained is not None:
            instead = option("set", {"encoder.pretrained": "MODEL"})
            raise InputError(f"{option('pretrained')} works only with the recipe auto. For another one give {instead}.")
        waits = applicable_overrides(recipe, [WAIT_FOR_TABLES]) if deterministic else []
        return _train(recipe, data, run, (*overrides, *waits), beam_options, process)
    if options.from_run is not None and pretrained is not None:
        raise InputError(
            f"{option('pretrained')} is for trials, and {option('from_run')} makes no trials. Give only one of the two."
        )
    from extremis.auto import run_auto
    from extremis.retention import tidy

    overrides = (*overrides, WAIT_FOR_TABLES) if deterministic else overrides
    process["pretrained"] = fspath(pretrained or "")
    earlier = options.from_run or ""
    outcome = run_auto(data, run, minutes or 0.0, overrides, beam_options, began=began, earlier=earlier, **process)
    tidy(run, 0)
    return TrainResult.of(outcome, run=run)


def _stated(keys: Mapping[str, object]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in keys.items() if value is not None]


def _train(
    recipe: str,
    data: str,
    run: str,
    overrides: Sequence[str],
    beam_options: Sequence[str] | None,
    process: Mapping[str, Any],
) -> TrainResult:
    """Train on the ranks that torchrun launched.

    `beam_options`: options for the miner; None: no miner.
    """
    from trainer.recipe_files import load_recipe

    load_recipe(recipe, overrides)  # a typo is reported before PyTorch is loaded

    from extremis.retention import tidy
    from extremis.supervisor import carry, joined_ranks
    from extremis.supervisor import train as train_watched
    from trainer.settings.resolve import resolve

    with joined_ranks() as group:
        resolved = resolve(recipe, overrides, data)
        for line in resolved.lines(data) if group.first else ():
            say(line)
        outcome = train_watched(data, run, resolved.recipe, beam_options=beam_options, group=group, **process)
    if group.first and (earlier := resolved.recipe.train.start_from):  # when no other rank waits for this rank
        carry(data, run, earlier, resolved.recipe.train.device)
    if group.first:
        tidy(run, 0 if resolved.recipe.tables is None else resolved.recipe.tables.keep)
        say(f"{run}: trained; next: extremis evaluate {data} {run}")
    return TrainResult.of(outcome, run=run)


@dataclass(frozen=True, repr=False, kw_only=True)
class MineResult(Result):
    """Facts of each table of negatives, by name; with watch, the number of tables."""

    run: str | None = None
    out: str | None = None
    tables: Mapping[str, Mapping[str, object]] | int


@function
def mine(
    data: PlaceOrData,
    run: PlaceOrData,
    options: ArrayOptions | None = None,
    *,
    epoch: NotNegative | None = None,
    watch: bool = False,
    metrics_port: _MetricsPort | None = None,
    metrics_host: _MetricsHost = "127.0.0.1",
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
    **fields: "Unpack[ArrayFields]",
) -> MineResult:
    """Mine hard-negative tables from the dumps of RUN, or from vectors of any model.

    Instead of DATA and RUN, you can give query vectors and document vectors: .npy, safetensors, Parquet or Arrow files,
    folders of such files, or, in Python, arrays. The table is then written to OUT/queries, and its data set to
    OUT/data, unless the vectors are those of an existing DATA. Options after -- are passed to Beam.

    Options:
        epoch: Epoch of the dump. Default: the newest complete dump.
        watch: Process every dump as it is completed, until the run is finished.

    Examples:
      extremis mine q.npy d.npy --positives pairs.csv --out mined/
      extremis mine q.npy d.npy --positives data/ --out mined/       one vector for each row of DATA
      extremis mine data/ runs/1                       the newest dump
      extremis mine data/ runs/1 --watch               alongside a trainer on any machine
      extremis mine data/ runs/1 --memory 8GiB --index IVF4096,PQ32x4fs
      extremis mine data/ runs/1 --by labels --out negatives/theta
      extremis mine data/ runs/1 --skip-top 5 --relative-margin 0.05 --overwrite
    """
    from schemas.storage import join

    options = options or ArrayOptions()
    with _as_files(data, run) as (queries, vectors), _metrics(metrics_host, metrics_port):
        if of_vectors := _has_vectors([queries, vectors], options, epoch, watch):
            from pipelines.arrays import mine_arrays

            about["run"] = ""  # RUN is a file of vectors
            manifests = mine_arrays(queries, vectors, options, beam_options, say)
        else:
            from extremis.miner import end_with_trainer, require_watchable
            from pipelines import mine as mining

            of_run = MineOptions(**options.model_dump(include={*MineOptions.model_fields}, exclude_unset=True))
            require_watchable(watch, of_run, epoch)
            if watch:
                end_with_trainer()
                with output(bars=False):  # another process may show its own
                    return MineResult(run=vectors, tables=mining.watch(queries, vectors, of_run, beam_options, say))
            manifests = mining.mine(queries, vectors, epoch, of_run, beam_options, say)
    facts = {name: _report(name, manifest, options.target_recall) for name, manifest in manifests.items()}
    if options.out:
        say(f"next: extremis inspect {join(options.out, next(iter(facts)))}")
    else:
        say(f"next: extremis inspect {queries} --run {vectors}")
    return MineResult(run=None if of_vectors else vectors, out=options.out, tables=facts)


@contextlib.contextmanager
def _as_files(*vectors: Any) -> Iterator[list[str]]:
    """Yield URLs to read `vectors` from: a URL unchanged; for an array, a file that exists until the block ends."""
    with contextlib.ExitStack() as stack:
        urls = []
        for name, each in zip(("queries", "vectors"), vectors, strict=True):
            if isinstance(each, str | PathLike):
                urls.append(fspath(each))
            else:
                import numpy as np

                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="extremis-vectors-"))
                urls.append(f"{folder}/{name}.npy")
                np.save(urls[-1], np.ascontiguousarray(each))
        yield urls


def _has_vectors(places: list[str], options: ArrayOptions, epoch: int | None, watch: bool) -> bool:
    """Return whether the input consists of vector files, or else of a dump.

    Raises InputError for options that need a dump.
    """
    from pipelines.arrays import urls_of

    of_arrays = {*ArrayOptions.model_fields} - {*MineOptions.model_fields}
    has_vectors = bool(of_arrays & options.model_fields_set)
    with contextlib.suppress(StorageError):  # --watch waits for storage
        urls = [urls_of(place) for place in places]
        has_vectors = (
            has_vectors or all(urls) or any(files == [place] for files, place in zip(urls, places, strict=True))
        )
    of_dumps = {"epoch": epoch, "watch": watch or None}
    of_dumps |= {name: getattr(options, name) for name in ("queries", "vectors", "for_epoch", "by")}
    flags = ", ".join(option(name) for name, value in of_dumps.items() if value is not None)
    if has_vectors and flags:
        raise InputError(
            f"{flags}: this option works only with the dumps of a RUN, but the input consists of vector files. Leave "
            "the option out, or give DATA and RUN."
        )
    return has_vectors


_LOOSER = {  # advice for rows that lack negatives, by the counter of a rule
    "beyond_window": "a larger {window}",
    "above_margin": "a smaller {margin} or {relative_margin}",
    "above_max_score": "a larger {max_score}",
    "below_min_score": "a smaller {min_score}",
}


def _report(name: str, manifest: "Manifest", target_recall: float) -> dict[str, object]:
    """Say how good a table is and why rows lack negatives, and return its facts."""
    from search.exclusions import DEEPEST

    recall, tuned = manifest.quality.get("recall_at_k"), manifest.quality.get("index_recall")
    index = f" (index {manifest.parameters['index']} when tuned: {tuned['least']:.4f})" if tuned else ""
    say(f"{name}: {manifest.rows:,} rows, recall " + ("not measured" if recall is None else f"{recall:.4f}") + index)
    if recall is not None and recall < target_recall:
        higher, exact = f"a higher {option('target_recall')}", option("index", "exact")
        say(f"{name}: recall is below {option('target_recall', target_recall)}: give {higher}, or {exact}")
    if short := manifest.counters["padded_rows"]:
        looser = [advice.format_map(Spelled()) for rule, advice in _LOOSER.items() if manifest.counters[rule]]
        advice = f"give {' or '.join(looser)}" if looser else "no other label may be a negative"
        if looser and manifest.parameters["window"] is None and manifest.parameters["labels"] > DEEPEST:
            advice += f" (the best {DEEPEST:,} labels of each block were searched; {option('window', 'W')} searches W)"
        say(f"{name}: {short:,} rows have fewer than {manifest.parameters['width']} negatives: {advice}")
    return {"digest": manifest.digest, **manifest.model_dump(include={"rows", "counters", "quality"})}


@dataclass(frozen=True, repr=False, kw_only=True)
class TableResult(Result):
    """A table of negatives at `out`, with its counters."""

    out: str
    digest: str
    rows: int
    counters: Mapping[str, int]


@function
def merge(
    data: Place,
    table: Place,
    out: Place,
    options: MergeOptions | None = None,
    *,
    others: Annotated[Sequence[str], COMMAS, Shown("TABLE,...")] = (),
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
    **fields: "Unpack[MergeFields]",
) -> TableResult:
    """Merge hard-negative tables with the same rows into one table, without repeated labels and without positives.

    Options after -- are passed to Beam.

    Options:
        others: Tables to merge with TABLE, for example a table that was mined with BM25 or with a different model.

    Example:
      extremis merge data/ negatives/ours/queries negatives/both --others negatives/bm25
    """
    from pipelines.mining import derived as merging

    tables, out = [fspath(table), *others], fspath(out)
    manifest = merging.merge(fspath(data), tables, out, options or MergeOptions(), beam_options, say)
    say(f"{out}: {manifest.rows:,} rows of {manifest.parameters['width']} negatives from {len(tables)} tables")
    say(f"next: extremis inspect {out}")
    return TableResult(out=out, digest=manifest.digest, rows=manifest.rows, counters=manifest.counters)


@function
def teach(
    data: Place,
    table: Place,
    teacher: Place,
    out: Place,
    options: TeachOptions | None = None,
    *,
    device: AnyDevice = "auto",
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
    **fields: "Unpack[TeachFields]",
) -> TableResult:
    """Score the negatives of TABLE with a cross-encoder, and write a table with the column `teacher`.

    TEACHER is a directory with a cross-encoder. With a margin, the command drops negatives that the teacher scores
    close to or above a positive. Queries and labels need texts. Options after -- are passed to Beam.

    Examples:
      extremis teach data/ negatives/queries cross-encoder/ negatives/scored
      extremis teach data/ negatives/queries cross-encoder/ negatives/sure --relative-margin 0.05 --width 20
    """
    from pipelines.mining import derived as teaching

    place, model, out = fspath(table), fspath(teacher), fspath(out)
    manifest = teaching.teach(fspath(data), place, model, out, options or TeachOptions(), beam_options, say, device)
    dropped = manifest.counters["above_teacher_margin"]
    say(f"{out}: {manifest.rows:,} rows, {manifest.counters['kept']:,} negatives kept and {dropped:,} dropped")
    say(f"next: extremis inspect {out}")
    return TableResult(out=out, digest=manifest.digest, rows=manifest.rows, counters=manifest.counters)


@dataclass(frozen=True, repr=False, kw_only=True)
class ClusterResult(Result):
    """A table of clusters; with watch, RUN and the number of tables."""

    run: str | None = None
    tables: int | None = None
    digest: str | None = None
    rows: int | None = None
    counters: Mapping[str, int] | None = None
    clusters: object = None


@function
def cluster(
    data: Place,
    run: Place,
    options: ClusterOptions | None = None,
    *,
    epoch: NotNegative | None = None,
    watch: bool = False,
    metrics_port: _MetricsPort | None = None,
    metrics_host: _MetricsHost = "127.0.0.1",
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
    **fields: "Unpack[ClusterFields]",
) -> ClusterResult:
    """Group the training queries into balanced clusters by their embeddings, for batches of similar queries.

    Use this command for recipes with order.cluster above 1, such as `ngame`. Options after -- are passed to Beam.

    Options:
        epoch: Epoch of the dump. Default: the newest complete dump.
        watch: Process every dump as it is completed, until the run is finished.

    Examples:
      extremis cluster data/ runs/1                    the newest dump
      extremis cluster data/ runs/1 --watch            alongside a trainer on any machine
      extremis cluster data/ runs/2 --queries embeddings/ --size 64 --for-epoch 0
      extremis cluster data/ runs/1 --memory 8GiB -- --direct_num_workers=8 --direct_running_mode=multi_processing
    """
    from extremis.miner import end_with_trainer, require_watchable
    from pipelines import cluster as clustering
    from schemas.layout import RunLayout, list_numbers

    data, run, options = fspath(data), fspath(run), options or ClusterOptions()
    require_watchable(watch, options, epoch)
    with _metrics(metrics_host, metrics_port):
        if watch:
            end_with_trainer()
            with output(bars=False):  # another process may show its own
                return ClusterResult(run=run, tables=clustering.watch(data, run, options, beam_options, say))
        manifest = clustering.cluster(data, run, epoch, options, beam_options, say)
    say(f"{manifest.rows:,} queries in {manifest.counters['clusters']:,} clusters, used from {run}")
    layout = RunLayout(run)
    newest = options.out or layout.clusters(list_numbers(layout.clusters_root)[-1], manifest.kind)
    say(f"next: extremis inspect {newest}")
    return ClusterResult(
        digest=manifest.digest,
        rows=manifest.rows,
        counters=manifest.counters,
        clusters=manifest.parameters["clusters"],
    )


@dataclass(frozen=True, repr=False, kw_only=True)
class RecipesResult(Result):
    """Recipes by name in `more` (`list`), or a recipe's keys (`show` in `more`; `copy`, `validate`)."""

    recipe: Mapping[str, object] | str | None = None
    out: str | None = None
    valid: bool | None = None
    options: Mapping[str, object] | None = None


@function
def recipes(
    action: Literal["list", "show", "copy", "validate"] = "list",
    recipe: Recipe | None = None,
    out: Place | None = None,
    *,
    set: Settings = (),
    progress: Progress = True,
) -> RecipesResult:
    """List the recipes that come with Extremis, or show, copy or validate a recipe.

    `auto` is not a recipe: `extremis run auto` tries a few recipes on the data, and trains the best. show prints the
    keys of RECIPE, including keys of the recipe that it extends. copy writes these keys to a TOML file OUT for you to
    edit. validate checks a recipe (a name or a file), with the changes of --set, in the same way as a run.

    Examples:
      extremis recipes
      extremis recipes show astra
      extremis recipes copy astra mine.toml
      extremis recipes validate mine.toml --set train.epochs=5
    """
    from trainer.recipe_files import load_recipe, read_recipe

    places = {"list": (), "show": (recipe,), "copy": (recipe, out), "validate": (recipe,)}[action]
    if None in places or (recipe, out)[len(places) :] != (None,) * (2 - len(places)):
        expected = {0: "nothing", 1: "RECIPE", 2: "RECIPE and OUT"}[len(places)]
        raise InputError(f"recipes {action}: expected {expected} after {action}.")
    name, changes = str(recipe), (*set,)
    if action == "list":
        return _list_recipes()
    if action == "validate":
        body = load_recipe(name, changes).model_dump(mode="json")
        say(f"{recipe}: valid")
        return RecipesResult(recipe=name, valid=True, options=body)
    import tomli_w

    keys = read_recipe(name, changes)
    text = tomli_w.dumps(keys)
    if out is None:
        return RecipesResult(more=keys, shown=[text.removesuffix("\n")])
    from schemas import storage
    from schemas.owners import require_output_file

    out = fspath(out)
    require_output_file(out, (), "Choose another name.")
    storage.write_bytes(out, text.encode())
    say(f"{out}: a copy of {recipe} to edit; next: extremis recipes validate {out}")
    return RecipesResult(out=out, recipe=keys)


def _list_recipes() -> RecipesResult:
    from trainer.methods.keys import flatten
    from trainer.recipe_files import AUTO_RECIPE, load_recipe, read_recipe, recipe_names

    by_name = {name: read_recipe(name) for name in recipe_names()}
    rows = [[AUTO_RECIPE, *["by trials"] * 2, *[""] * 3]]
    for name, body in by_name.items():
        recipe = load_recipe(name)
        values = {**flatten(recipe.model_dump()), **flatten(body)}  # "auto" where the data decide
        random = f"{values.get('negatives.random', '')} {values.get('negatives.pool', '')}".removesuffix(" auto")
        random = "all labels" if recipe.negatives.all_labels else random
        hard, epochs = str(values.get("negatives.hard", "")), str(values["train.epochs"])
        rows.append([name, recipe.method, recipe.loss.kind, hard, random, epochs])
    columns = ["name", "method", "loss", "hard", "random", "epochs"]
    return RecipesResult(more={AUTO_RECIPE: {}, **by_name}, shown=[Grid("recipes", columns, rows)])


@dataclass(frozen=True, repr=False, kw_only=True)
class PlanResult(Result):
    """Estimates in bytes: `tables` in storage, `memory` of each step, and the steps that do not fit, in `over`."""

    workload: Mapping[str, object]
    tables: Mapping[str, Mapping[str, object]]
    memory: Mapping[str, int]
    over: Mapping[str, int]
    bytes: int
    steps: int
    settings: Mapping[str, object]


def _whole(value: Any) -> Any:
    """Parse a whole number, which may be written as 370e6."""
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if number < 1 or number != int(number) or number > 1e15:
        raise PydanticCustomError("count", "input should be a whole number of at least 1, such as 370e6")
    return int(number)


_Count = Annotated[float, BeforeValidator(_whole), Shown("NUMBER")]


@function
def plan(
    *,
    queries: _Count | None = None,
    labels: _Count | None = None,
    data: Place | None = None,
    tokens: float = 32,
    label_tokens: float = 8,
    labels_per_query: float = 5,
    key_bytes: float = 12,
    text_bytes: float = 40,
    vocabulary: Annotated[int, Field(ge=2)] = 30_000,
    recipe: Recipe = "astra",
    set: Settings = (),
    dimension: Positive | None = None,
    width: Positive | None = None,
    epochs: Positive | None = None,
    ranks: Positive = 1,
    workers: Positive = 1,
    engine: Literal["flink", "spark"] | None = None,
    memory: Size = "8GiB",
    progress: Progress = True,
) -> PlanResult:
    """Estimate the bytes of every table and the memory of every step before a run starts.

    Settings that a recipe takes from the data are computed from the given numbers.

    Options:
        queries: Number of queries, N. Default: the number in DATA.
        labels: Number of labels, L. Default: the number in DATA.
        data: A sharded sample of the data, from which averages per row are computed.
        tokens: Tokens per query, on average.
        label_tokens: Tokens per label, on average.
        labels_per_query: Labels per query, on average.
        key_bytes: Characters of a key, on average.
        text_bytes: Characters of a label, on average.
        vocabulary: Number of tokens in the vocabulary.
        dimension: Dimension of embeddings, D. Default: as in the recipe.
        width: Number of negatives per row in tables, K. Default: as in the recipe.
        epochs: Number of epochs. Default: as in the recipe.
        ranks: Number of trainer processes.
        workers: Number of pipeline workers.
        engine: Engine of the cluster that runs the pipelines. Default: none.
        memory: Memory of each process.

    Examples:
      extremis plan --queries 370e6 --labels 120e6 --tokens 10 --dimension 64 --memory 64GiB
      extremis plan --data data/ --queries 370e6 --labels 120e6 --json
      extremis plan --queries 370e6 --labels 120e6 --tokens 10 --engine flink --workers 64
    """
    averages = {
        "tokens": tokens,
        "label_tokens": label_tokens,
        "labels_per_query": labels_per_query,
        "key_bytes": key_bytes,
        "text_bytes": text_bytes,
        "vocabulary": vocabulary,
        "ranks": ranks,
        "workers": workers,
    }
    from extremis import planning as planning
    from trainer.recipe_files import load_recipe

    recipe, data = fspath(recipe), None if data is None else fspath(data)
    keys = {"encoder.dimension": dimension, "negatives.width": width, "train.epochs": epochs}
    overrides = (*set, *_stated(keys))
    rows, columns = (None if count is None else int(count) for count in (queries, labels))
    workload = planning.workload(data, rows, columns, load_recipe(recipe, overrides), int(memory), averages)
    resolved = planning.resolve_for(workload, recipe, overrides, data)
    for line in resolved.reasons:
        say(line)
    workload = replace(workload, recipe=planning.with_streams_for(ranks, resolved.recipe, say))
    report = planning.plan(workload, engine)
    given = [word for override in overrides for word in ("--set", override)]
    say(f"next: {shlex.join(['extremis', 'run', recipe, data or 'DATA', 'RUN', *given])}")
    return PlanResult.of(report, planning.view(report), settings=resolved.settings)
