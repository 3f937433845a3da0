"""`extremis mine`: mines hard-negative tables from the dumps of a run, or from vectors of any model."""

import contextlib
import tempfile
from collections.abc import Iterator
from os import PathLike, fspath
from typing import Any, Literal

from extremis.command import Progress, build_options, command, format_argument
from extremis.commands.shared import BeamOptions, Device, Fields, NotNegative, Size, StartTimeout, Url
from extremis.console import output, say
from extremis.miner import end_with_trainer, require_watchable
from pipelines.options import ArrayOptions, MineOptions, SameKey
from schemas.errors import InputError, StorageError
from schemas.logs import about

_ARRAY_OPTIONS = ("positives", "metric", "fields", "same_key", "query_texts", "document_texts")
_RUN_OPTIONS = ("epoch", "watch", "queries", "vectors", "for_epoch", "by")
_LOOSER = {  # advice for rows that lack negatives, by the counter of a rule
    "beyond_window": "a larger --window",
    "above_margin": "a smaller --margin or --relative-margin",
    "above_max_score": "a larger --max-score",
    "below_min_score": "a smaller --min-score",
}


@command(ArrayOptions)
def mine(
    data: Any,
    run: Any,
    *,
    positives: Url | None = None,
    metric: Literal["inner", "cosine"] | None = None,
    fields: Fields | None = None,
    same_key: SameKey | None = None,
    query_texts: Url | None = None,
    document_texts: Url | None = None,
    epoch: NotNegative | None = None,
    watch: bool = False,
    queries: Url | None = None,
    for_epoch: int | None = None,
    out: Url | None = None,
    memory: Size | None = None,
    seed: int | None = None,
    overwrite: bool = False,
    by: Literal["classifier", "labels", "points"] | None = None,
    vectors: Url | None = None,
    width: int | None = None,
    ranges: int | None = None,
    skip_top: int | None = None,
    window: int | None = None,
    margin: float | None = None,
    relative_margin: float | None = None,
    max_score: float | None = None,
    min_score: float | None = None,
    sample: Literal["top", "uniform", "softmax"] | None = None,
    temperature: float | None = None,
    equal_texts: Literal["off", "equal", "near"] | None = None,
    index: str | None = None,
    target_recall: float | None = None,
    nprobe: int | None = None,
    ef_search: int | None = None,
    refine: int | None = None,
    block_rows: int | None = None,
    query_batch: int | None = None,
    tasks_per_block: int | None = None,
    threads: int | None = None,
    device: Device | None = None,
    audit_queries: int | None = None,
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
) -> dict[str, Any]:
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
    arguments = {**locals(), "fields": fields and format_argument(fields)}
    with _as_files(data, run) as (data, run):
        if of_vectors := _has_vectors([data, run], arguments):
            from pipelines.arrays import mine_arrays

            about["run"] = ""  # RUN is a file of vectors
            options: MineOptions = (array_options := build_options(ArrayOptions, arguments))
            manifests = mine_arrays(data, run, array_options, beam_options, say)
        else:
            options = build_options(MineOptions, arguments)
            require_watchable(watch, options, epoch)
            from pipelines import mine as mining

            if watch:
                end_with_trainer()
                with output(bars=False):  # another process may show its own
                    return {"run": run, "tables": mining.watch(data, run, options, beam_options, progress=say)}
            manifests = mining.mine(data, run, epoch, options, beam_options, say)
    tables = {name: _report(name, manifest, options.target_recall) for name, manifest in manifests.items()}
    from schemas.storage import join

    table = join(options.out, next(iter(tables))) if options.out else f"{data} --run {run}"
    say(f"next: extremis inspect {table}")
    places = {} if of_vectors else {"run": run}
    return places | ({"out": options.out} if options.out else {}) | {"tables": tables}


@contextlib.contextmanager
def _as_files(*vectors: Any) -> Iterator[list[str]]:
    """Yield URLs to read `vectors` from: a URL unchanged; for an array, a file that exists until the block ends."""
    with tempfile.TemporaryDirectory(prefix="extremis-vectors-") as folder:
        urls = []
        for name, each in zip(("queries", "vectors"), vectors, strict=True):
            urls.append(fspath(each) if isinstance(each, str | PathLike) else f"{folder}/{name}.npy")
            if urls[-1] is not each and not isinstance(each, PathLike):
                import numpy as np

                np.save(urls[-1], np.ascontiguousarray(each))
        yield urls


def _has_vectors(places: list[str], arguments: dict[str, Any]) -> bool:
    """Return whether the input consists of vector files, or else of a dump.

    Raises InputError for options that need a dump.
    """
    from pipelines.arrays import urls_of

    has_vectors = any(arguments[name] for name in _ARRAY_OPTIONS)
    with contextlib.suppress(StorageError):  # --watch waits for storage
        urls = [urls_of(place) for place in places]
        has_vectors = (
            has_vectors or all(urls) or any(files == [place] for files, place in zip(urls, places, strict=True))
        )
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in _RUN_OPTIONS if arguments[name] not in (None, False))
    if has_vectors and flags:
        raise InputError(
            f"{flags}: this option works only with the dumps of a RUN, but the input consists of vector files. Leave "
            "the option out, or give DATA and RUN."
        )
    return has_vectors


def _report(name: str, manifest: Any, target_recall: float) -> dict[str, Any]:
    from search.exclusions import DEEPEST

    recall, tuned = manifest.quality.get("recall_at_k"), manifest.quality.get("index_recall")
    index = f" (index {manifest.parameters['index']} when tuned: {tuned['least']:.4f})" if tuned else ""
    say(f"{name}: {manifest.rows:,} rows, recall " + ("not measured" if recall is None else f"{recall:.4f}") + index)
    if recall is not None and recall < target_recall:
        say(f"{name}: recall is below --target-recall {target_recall}: give a higher --target-recall, or --index exact")
    if short := manifest.counters["padded_rows"]:
        looser = [advice for rule, advice in _LOOSER.items() if manifest.counters[rule]]
        advice = f"give {' or '.join(looser)}" if looser else "no other label may be a negative"
        if looser and manifest.parameters["window"] is None and manifest.parameters["labels"] > DEEPEST:
            advice += f" (the best {DEEPEST:,} labels of each block were searched; --window W searches W)"
        say(f"{name}: {short:,} rows have fewer than {manifest.parameters['width']} negatives: {advice}")
    return {"digest": manifest.digest, **manifest.model_dump(include={"rows", "counters", "quality"})}
