"""Run flows as Beam pipelines on engines and services; if a worker fails, raise the worker's original error."""

import contextlib
import difflib
import functools
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics, MetricsFilter
from apache_beam.metrics.metric import MetricResults
from apache_beam.options import pipeline_options as options
from apache_beam.pvalue import AsDict, PCollection, TaggedOutput
from apache_beam.runners.portability.portable_runner import PortableRunner
from apache_beam.runners.runner import create_runner
from apache_beam.transforms.window import GlobalWindows

from pipelines.flow import MAIN, Elements, Flow, Output, Tagged, Work
from pipelines.progress import Count, Progress, add_listener, sum_counts
from pipelines.runners.base import Runner
from pipelines.runners.engines import Engine, failure
from pipelines.runners.worker import Question, answer
from schemas.errors import ExtremisError, InputError

_NAMESPACE = "extremis"  # namespace of metrics
# Beam appends the name of the step to a worker's message; the last line of the traceback names the error class.
_STEP = re.compile(r" \[while running '[^']*'\]")


class BeamRunner(Runner):
    """Runner that passes flows to Beam with the options `flags`. Raises InputError for an unknown runner or option."""

    far = True

    def __init__(self, flags: Sequence[str]) -> None:
        self._options = options.PipelineOptions(list(flags))
        # Extremis defines nothing in a main module, so workers do not need a copy of it.
        self._options.view_as(options.SetupOptions).save_main_session = False
        name = self._options.view_as(options.StandardOptions).runner
        if self._options.view_as(options.GoogleCloudOptions).template_location:
            raise InputError(
                "--template_location: a command runs several jobs, and each job needs the result of the previous job. "
                "Leave --template_location out."
            )
        try:
            self._runner = create_runner(name)
        except (ValueError, ImportError, AttributeError) as error:
            raise InputError(
                f"cannot use the Beam runner {name!r}: {error}. Leave --runner out to run in this process."
            ) from None
        refuse_unknown_options(tuple(flags))
        self._counts: dict[str, Count] = {}  # counts of all flows so far
        portable = self._runner if isinstance(self._runner, PortableRunner) else None
        self._engine = None if portable is None else Engine(portable, self._options, flags)
        self.pipeline()  # fails if the runner's own checks fail

    def __exit__(self, *error: object) -> None:
        """Stop the servers that were started for an engine."""
        if self._engine is not None:
            self._engine.close()

    def check(self, reads: Sequence[str], folder: str, say: Progress) -> None:
        """Ask an engine's workers whether they can read `reads` and write below `folder`. Raises as `Engine.ask`."""
        if self._engine is not None:
            self._engine.ask(reads, folder, say)

    def pipeline(self) -> beam.Pipeline:
        """Make an empty pipeline. Raises InputError if the runner rejects the options."""
        try:
            pipeline = beam.Pipeline(runner=self._runner, options=self._options)
        except ValueError as error:  # a runner's own checks: an invalid bucket or project
            raise InputError(f"Beam options: {str(error).strip()}") from None
        # This folder is for transforms in other languages, which are not used. Beam would not remove the folder.
        os.rmdir(pipeline.local_tempdir)
        return pipeline

    def _run(self, flow: Flow) -> Mapping[str, Count]:
        """Run `flow`. Re-raises a worker's ExtremisError unchanged. Raises ExtremisError if an engine failed."""
        engine = self._engine
        name = engine.name_job() if engine is not None else ""
        pipeline = self.pipeline()
        translate(flow, pipeline, engine.question if engine is not None else None)
        with _silence_loggers() if engine is not None else contextlib.nullcontext():
            try:
                if engine is not None:
                    metrics = engine.run(pipeline, name)
                else:
                    result = pipeline.run()
                    result.wait_until_finish()
                    metrics = result.metrics()
                self._counts = sum_counts([self._counts, counts_of(metrics)])
                return self._counts
            except Exception as error:
                cause = find_worker_error(error)
                if cause is not None:
                    raise cause from None
                raise failure(str(error), service=engine is None) from error


@contextlib.contextmanager
def _silence_loggers() -> Iterator[None]:
    """Silence the tracebacks that Beam's portable runners log, also to the root logger: the errors are also raised."""
    loggers = [logging.getLogger(name) for name in ("apache_beam", "")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def translate(flow: Flow, pipeline: beam.Pipeline, question: Question | None = None) -> None:
    """Add the stages of `flow` to a Beam pipeline. Each worker answers `question` before the worker starts."""
    made: dict[Output, PCollection] = {}

    def read(outputs: Sequence[Output], name: str) -> PCollection:
        if len(outputs) == 1:
            return made[outputs[0]]
        return tuple(made[output] for output in outputs) | f"{name}: all" >> beam.Flatten()

    for number, stage in enumerate(flow.stages):
        label = f"{stage.name} ({number})"  # unique to this stage
        if stage.given is not None:
            made[Output(number, MAIN)] = pipeline | label >> beam.Create(list(stage.given))
            continue
        inputs = read(stage.reads, label)
        if stage.work is None:
            made[Output(number, MAIN)] = inputs | label >> beam.GroupByKey()
            continue
        sides = {place: AsDict(read(outputs, f"{label}: {place}")) for place, outputs in stage.sides.items()}
        arguments = [sides.get(place, argument) for place, argument in enumerate(stage.work.arguments)]
        if stage.work.kind == "map_partitions":
            do: _Step = _PartitionStep(stage.work, question)
        else:
            do = _ElementStep(replace(stage.work, arguments=()), question)
        step = beam.ParDo(do, *arguments)
        outputs = inputs | label >> step.with_outputs(*(tag for tag in stage.tags if tag != MAIN), main=MAIN)
        made |= {Output(number, tag): outputs[tag] for tag in stage.tags}


class _Step(beam.DoFn):
    """DoFn that does the work of a stage. The worker answers the question at its first element.

    If `setup` failed instead, Java would wait three minutes and hide the reason.
    """

    def __init__(self, work: Work, question: Question | None) -> None:
        self._work, self._question = work, question

    def answer(self) -> None:
        if self._question is not None:
            answer(self._question)


class _ElementStep(_Step):
    """Step that processes one element at a time, with arguments from Beam."""

    def process(self, element: Any, *arguments: Any) -> Iterator[Any]:
        self.answer()
        yield from map(_for_beam, replace(self._work, arguments=arguments)([element]))


class _PartitionStep(_Step):
    """Step that collects the elements of a bundle, which are small, and processes them at the end of the bundle."""

    def start_bundle(self) -> None:
        self._elements: Elements = []

    def process(self, element: Any, *_: Any) -> None:
        self.answer()
        self._elements.append(element)

    def finish_bundle(self) -> Iterator[Any]:
        for made in map(_for_beam, self._work(self._elements)):
            if isinstance(made, TaggedOutput):
                yield TaggedOutput(made.tag, GlobalWindows.windowed_value(made.value))
            else:
                yield GlobalWindows.windowed_value(made)


def _for_beam(made: Any) -> Any:
    return TaggedOutput(made.tag, made.value) if isinstance(made, Tagged) else made


def counts_of(metrics: MetricResults | None) -> dict[str, Count]:
    """Return the counts of a finished pipeline from `metrics`; empty if the runner reports no metrics."""
    counts: dict[str, Count] = {}
    with contextlib.suppress(Exception):  # any error: the runner has no metrics
        assert metrics is not None
        measured = metrics.query(MetricsFilter().with_namespace(_NAMESPACE))
        for metric in measured["counters"]:
            step, _, unit = metric.key.metric.name.rpartition(".")
            more = Count(rows=metric.result) if unit == "rows" else Count(bytes=metric.result)
            counts[step] = counts.get(step, Count()).add(more)
        for metric in measured["distributions"]:
            step = metric.key.metric.name.rpartition(".")[0]
            span = Count(0, 0, metric.result.min / 1000, metric.result.max / 1000)
            counts[step] = counts.get(step, Count()).add(span)
    return counts


@add_listener
def _count_in_beam(step: str, rows: int, size: int, now: float) -> None:
    """Count rows, bytes and times in Beam's metrics. Workers register this function when they load the DoFns above."""
    Metrics.counter(_NAMESPACE, f"{step}.rows").inc(rows)
    Metrics.counter(_NAMESPACE, f"{step}.bytes").inc(size)
    Metrics.distribution(_NAMESPACE, f"{step}.milliseconds").update(round(1000 * now))


def find_worker_error(error: BaseException) -> ExtremisError | None:
    """Return the ExtremisError that a runner wrapped in `error`, or None.

    Runners in this process chain or re-raise the exception. Other runners return the traceback as text.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ExtremisError):
            return type(seen)(_STEP.sub("", str(seen)))
        seen = seen.__cause__ or seen.__context__
    classes = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in (ExtremisError, *_subclasses(ExtremisError))}
    names = "|".join(re.escape(name) for name in classes)
    # A chain of tracebacks repeats the message, so the last match counts; `ends` is the text after a message.
    ends = r" \[while running '|^\n(?:During handling|The above)|^\s*\tat |\Z"
    matches = re.findall(rf"^({names}): (.*?)(?={ends})", str(error), re.DOTALL | re.MULTILINE)
    if not matches:
        return None
    name, message = matches[-1]
    return classes[name](message.strip())


@functools.cache
def refuse_unknown_options(flags: tuple[str, ...]) -> None:
    """Raise InputError for options that Beam does not know; Beam itself would ignore them with a warning."""
    parser = options._BeamArgumentParser(allow_abbrev=False, exit_on_error=False)
    for kind in _subclasses(options.PipelineOptions):
        with contextlib.suppress(Exception):  # two classes may declare the same option
            kind._add_argparse_args(parser)  # type: ignore[attr-defined]
    try:
        _, unknown = parser.parse_known_args(list(flags))
    except Exception as error:
        raise InputError(f"Beam options {list(flags)}: {error}.") from None
    if not unknown:
        return
    names = [name for action in parser._actions for name in action.option_strings]
    near = difflib.get_close_matches(unknown[0].split("=")[0], names, n=1)
    hint = f" Did you mean {near[0]}?" if near else " Options after `--` go to Beam; see the docs of the runner."
    raise InputError(f"unknown Beam option {unknown[0]!r}.{hint}")


def _subclasses(kind: type) -> list[type]:
    children: list[type] = kind.__subclasses__()
    return [deep for child in children for deep in (child, *_subclasses(child))]
