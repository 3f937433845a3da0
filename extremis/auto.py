"""`run auto`: survey the data, list contenders, try them on an excerpt, choose one, train and fuse it."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tomli_w

from extremis.console import RemainingTime, output, say, show_activity
from extremis.finalists import Finalist, move_run, train_finalist
from extremis.processes import Calls
from extremis.stopping import GRACE
from extremis.summary import repeated, texts_of
from extremis.supervisor import carry, logged, train
from schemas import storage
from schemas.arrow import DENSE
from schemas.errors import DivergedError, InputError, option
from schemas.hashing import hash_strings
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest, is_published, open_manifest, publish
from schemas.owners import claimed, require_output_folder
from schemas.randomness import Purpose, generator
from schemas.shard_files import shards
from schemas.shard_files.parquet import list_array, list_column
from schemas.shares import ALL_ROWS, seed_of
from schemas.storage import join, read_json, write_json
from schemas.table import PARTS, Table
from schemas.versions import VERSION
from schemas.waits import waiting
from scoring.fitting import REFIT_HOLDOUT, describe_fusion, fit_ranker
from search.topk import faiss_threads
from trainer.checkpoints import best_step
from trainer.device import CPU, open_device
from trainer.encoders.bag_encoder import find_token_vectors
from trainer.evaluation.metrics import Contributions, paired_difference
from trainer.input_kinds import InputKind, input_names, kind_of
from trainer.inputs import require_inputs
from trainer.loop import EpochReport
from trainer.methods.astra import Astra
from trainer.methods.recipe import Recipe
from trainer.methods.sections import Data
from trainer.model import DataSizes, find_earlier, require_same_data
from trainer.recipe_files import WAIT_FOR_TABLES, applicable_overrides, load_config, read_recipe, validate
from trainer.settings.data_statistics import DataStatistics, describe_textless_labels, measure
from trainer.settings.resolve import Resolved, measure_rows, resolve
from trainer.sizes import encoder_bytes, free_memory, label_bytes
from trainer.stream import open_queries, ranks_of_environment

_ROWS = 200_000  # rows of queries and of labels to compare
_ONE_VS_ALL_LABELS = 8_000  # up to this many labels, scoring all labels costs about as much as a shared pool
_NGRAM_WEIGHTS = (0.1, 0.4, 1.0)
# On WordNet, 10 mined negatives per query instead of 2 gain 0.3 P@5 and double the time: each negative is one more
# label to encode.
_FEW_MINED = "negatives.hard=2"
# A shared pool draws an eighth of this number of labels per step. Mined negatives added at most 0.2 P@1, for half
# more time, on artworks with 9,315 and 15,562 labels.
_FEW_LABELS = 25_600


@dataclass(frozen=True)
class Survey:
    """Statistics of DATA, and the `inputs` that an encoder can read.

    `texts`: fraction of labels that have a text. `symmetric`: fraction of these texts that are also queries.
    `textless`: trained labels without a text, in words, and whether there are too many for a recipe with texts.
    """

    facts: DataStatistics
    inputs: InputKind
    texts: float = 0.0
    symmetric: float = 0.0
    textless: tuple[str, bool] = "", False

    @classmethod
    def of(cls, data: DataLayout) -> "Survey":
        """Survey the training split. Raises InputError, TableError."""
        facts = measure(data, "train", ALL_ROWS, label_texts=False)
        sizes, tables = DataSizes.of(data), (Table.open(data.labels, "labels"), open_queries(data, "train"))
        has_dense = DENSE in tables[1].columns
        inputs = kind_of({"tokens": bool(sizes.vocabulary), "features": bool(sizes.features), "dense": has_dense})
        if inputs == "none":
            require_inputs(tables[1], "tokens")
        if not sizes.vocabulary or (has_dense and DENSE not in tables[0].columns):  # these labels cannot be encoded
            return cls(facts, inputs)
        labels, queries = (texts_of(table, _ROWS) for table in tables)
        filled = pc.sum(pc.greater(pc.binary_length(labels), 0)).as_py() or 0
        too = pc.sum(repeated(labels, queries)).as_py() or 0
        texts, symmetric = filled / max(1, len(labels)), too / max(1, filled)
        return cls(facts, inputs, texts, symmetric, describe_textless_labels(data, inputs, Data()))

    @property
    def labels_have_texts(self) -> bool:
        """True if most labels can be encoded, and a recipe that encodes texts is not refused."""
        return self.texts > 0.5 and not self.textless[1]

    @property
    def is_symmetric(self) -> bool:
        """True if most labels are also queries. Pairs may then have reverse pairs, which an excerpt would lose."""
        return self.labels_have_texts and self.symmetric > 0.5

    def lines(self) -> Iterator[str]:
        """Describe the survey, one fact per line."""
        facts = self.facts
        named = {"tokens": f"{facts.tokens:.0f} tokens", "features": "sparse features", "dense": "a dense vector"}
        read = " and ".join(named[part] for part in input_names(self.inputs))
        yield f"{facts.queries:,} queries of {read}, {facts.labels:,} labels"
        each = facts.pairs / max(1, facts.queries)
        yield f"{each:.1f} labels per query, median number of training points per label: {facts.median_frequency:g}"
        yield f"{self.texts:.0%} of the labels have a text" + (
            f", {self.symmetric:.0%} of these texts are also queries" if self.texts else ""
        )
        if self.textless[1]:
            yield f"odd: {self.textless[0]}: recipes that encode texts of labels are not tried"


class Contender(NamedTuple):
    """A recipe's name, and changes to the recipe."""

    recipe: str
    changes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the contender's trial: the recipe's name and the changed values."""
        stated = (change.partition(".")[2].split("=", 1) for change in self.changes)
        return "-".join([self.recipe, *(f"{name}-{value.rstrip('/').rpartition('/')[2]}" for name, value in stated)])

    @property
    def is_dual_encoder(self) -> bool:
        return _FEW_MINED in self.changes

    def changed(self, *changes: str) -> "Contender":
        """Return the same recipe with more changes."""
        return self._replace(changes=(*self.changes, *changes))


def contenders(survey: Survey, pretrained: str = "") -> list[Contender]:
    """List one contender of each kind that is possible for the data: one-vs-all, decoupled softmax, dual encoder.

    With `pretrained`, a model with token vectors, each contender is listed twice: with and without these vectors.
    """
    labels, texts = survey.facts.labels, f"data.label_texts={'true' if survey.labels_have_texts else 'false'}"
    mined = ("negatives.hard=0",) if labels <= _FEW_LABELS else ()
    is_small = labels <= _ONE_VS_ALL_LABELS
    kinds = [Contender("renee", (texts,)) if is_small else Contender("astra", (texts, *mined))]
    if survey.labels_have_texts:
        # Each label that is also a query would be a training point twice.
        no_texts = ("data.label_texts=false",) if survey.is_symmetric else ()
        # Decoupled softmax comes first, because it is often the best: then the others can stop at half-time.
        kinds = [Contender("decoupled", mined), *kinds, Contender("dexml-sampled", (_FEW_MINED, *no_texts))]
    read = () if survey.inputs == "tokens" else (f"encoder.inputs={survey.inputs}",)
    starts = [(f"encoder.pretrained={pretrained}",), ()] if pretrained else [()]
    return [kind.changed(*read, *start) for start in starts for kind in kinds]


def variations(best: Contender, weight: float) -> list[Contender]:
    """List variations of the best contender with other n-gram weights, which affect word vectors the most."""
    nearest = min(_NGRAM_WEIGHTS, key=lambda value: abs(math.log(value / max(weight, 0.01))))
    return [best.changed(f"encoder.ngram_weight={value:g}") for value in _NGRAM_WEIGHTS if value != nearest]


_DROPOUT = "encoder.dropout=0.3"
# Tables as early as they can be: two epochs old, and a new one every second epoch.
_TABLES = "negatives.hard=20", "refresh.source=table", "refresh.start=2", "refresh.every=2", "refresh.stale=wait"


def propose_second(
    chosen: Contender, recipe: Recipe, survey: Survey, peaked_first: bool = False
) -> tuple[str, Contender]:
    """Return a name and a contender for the second finalist beside the `chosen` one's `recipe`; itself for none.

    Decoupled softmax is better than sampled one-vs-all at full length, which short trials do not show. Dropout lets
    hard negatives help, and a margin makes them weigh ten times as much (decision 55).
    """
    if peaked_first:
        stated, rates = recipe.model_dump(), (("encoder", "lr"), ("encoder", "dense_lr"), ("classifier", "lr"))
        halves = (f"{part}.{name}={stated[part][name] / 2:g}" for part, name in rates if name in stated.get(part, {}))
        return "half of the rates", chosen.changed(*halves)
    if chosen.is_dual_encoder:  # on WordNet, dropout was worse; a margin of the pool was not tried on enough data
        return "none is known for a dual encoder", chosen
    if survey.labels_have_texts:
        chosen = Contender("decoupled", tuple(change for change in chosen.changes if change.startswith("encoder.")))
    elif not isinstance(recipe, Astra):
        return "dropout", chosen.changed(_DROPOUT)
    tables = () if isinstance(recipe, Astra) and recipe.negatives.hard else _TABLES
    margin = f"negatives.hard_margin={math.log(10):.3f}"
    return "dropout and hard negatives with a margin", chosen.changed(_DROPOUT, *tables, margin)


METRIC = "nDCG@5"  # reflects P@1 and P@5 together
SHOWN_METRICS = "P@1", "P@5", METRIC
QUERIES = 2_000  # maximum for the scores of a trial
_FEW_QUERIES = 200  # for which up to a tenth of the rows is held out: 50 of 1,000 rows gave random weights of scores
_TRIAL_ROWS = 100_000  # rows of a trial, fewer if texts are long
_ROW_TOKENS = 200  # tokens that cost about as much as the rest of a row
_EPOCHS = 2, 4  # minimum and maximum; a trial passes over about _ROWS rows
_LOST = 4.0  # standard errors by which a recipe that is behind has lost: more than by chance, because curves cross
_NEAR = 2.0  # standard errors within which a dual encoder is as good
_WIDTH = 128  # D of a trial: shows the ranking of recipes at a quarter of the cost
_HALF_TIME = "half-time.json"
SCANNED_ROWS = 5_000_000  # maximum of rows read from the training split


@dataclass(frozen=True)
class Trial:
    """Scores of a contender on the held-out rows, and the seconds of its trial.

    `course`: each row's contribution to METRIC after each validation; all trials are scored on the same rows, whose
    texts have the numbers `texts`. `ended`: the trial lost, and training stopped early. `epoch`: seconds that the last
    epoch took.
    """

    contender: Contender
    metrics: dict[str, float]
    course: list[list[float]]
    ended: bool
    seconds: float
    texts: list[int]
    epoch: float = 0.0

    @property
    def score(self) -> float:
        return self.metrics[METRIC]

    def lead(self, course: Sequence[Sequence[float]]) -> tuple[float, float]:
        """Return by how much the trial leads in METRIC where `course` ends, and the paired standard error by text.

        A trial that ended earlier, for lack of time, is compared by its own end.
        """
        ours, theirs = (Contributions(np.array(each[-1])) for each in (self.course[: len(course)], course))
        return paired_difference([ours], [theirs], np.array(self.texts))

    def beats(self, other: Contender, course: Sequence[Sequence[float]], epochs: int) -> bool:
        """Return whether `other` has lost, given its rows' scores `course` after `epochs` epochs.

        A variation of the same recipe loses if it is behind after two epochs or more. A different recipe loses if it
        is behind by more than _LOST standard errors. On WordNet, n-grams with full weight are 3.4 points behind after
        one epoch and 0.7 points ahead after two epochs.
        """
        is_change = other.recipe == self.contender.recipe
        if len(course) > len(self.course) or (is_change and epochs < 2):
            return False
        lead, error = self.lead(course)
        return lead > (0.0 if is_change else _LOST * error)


@dataclass(frozen=True)
class TrialData:
    """Rows for training and scoring all trials: the fraction `share` of the `rows` rows at `data`.

    Each trial trains for `epochs` epochs on `device`, with `threads` threads, and is stored in `folder`.
    """

    data: str
    rows: int
    share: float
    epochs: int
    folder: str
    device: str
    threads: int

    @classmethod
    def prepare(cls, data: str, survey: Survey, folder: str, device: str, threads: int = 0) -> "TrialData":
        """Write an excerpt of DATA into `folder` if DATA itself is too large for trials. Raises ExtremisError."""
        facts = survey.facts
        rows, drawn, share = round(_TRIAL_ROWS / (1 + facts.tokens / _ROW_TOKENS)), facts.queries, 1.0
        passed = drawn + round(survey.texts * facts.labels)  # texts of labels are also rows
        epochs = min(max(round(rows / max(1, passed)), _EPOCHS[0]), _EPOCHS[1])
        if drawn > rows and survey.is_symmetric:
            share = float(f"{rows / drawn:.3g}")
        elif drawn > rows:
            excerpt = join(folder, "data")
            write_excerpt(DataLayout(data), excerpt, rows)
            data, drawn = excerpt, measure(DataLayout(excerpt), "train", ALL_ROWS, label_texts=False).queries
        return cls(data, drawn, share, epochs, folder, device, threads)

    def run_trial(
        self, contender: Contender, title: str, earlier: Sequence[Contender] = (), minutes: float = 0.0
    ) -> Trial:
        """Train a contender without negative tables, for at most `minutes` (0: no limit), or until it loses.

        At half-time, it can lose to the best of the `earlier` ones at that time, which may run beside this trial.
        Prints only lines that begin with `title`, and logs all lines. An existing trial is not run again.
        Raises ExtremisError.
        """
        place, run = join(self.folder, f"{contender.name}.json"), join(self.folder, contender.name)
        if storage.exists(place):
            return Trial(contender, **read_json(place))
        storage.remove(run, recursive=True)
        began, course, texts, ended = time.perf_counter(), list[list[float]](), list[int](), False

        def should_continue(report: EpochReport) -> bool:
            nonlocal ended, texts
            if report.scored and report.scored.texts is not None:
                course.append(report.scored.contributions()[METRIC].achieved.round(4).tolist())
                texts = np.unique(report.scored.texts, return_inverse=True)[1].tolist()
                if report.epoch + 1 < report.epochs:
                    scored = {"metrics": report.metrics, "course": course, "texts": texts}
                    write_json(join(run, _HALF_TIME), {**scored, "ended": False, "seconds": 0.0})
                    known = [trial for trial in map(self._wait_for, earlier) if len(trial.course) >= len(course)]
                    best = max(known, key=lambda trial: statistics.fmean(trial.course[len(course) - 1]), default=None)
                    ended = best is not None and best.beats(contender, course, report.epoch + 1)
            return not ended

        recipe = self.recipe(contender, minutes)
        with output(log_only=True):
            outcome = train(self.data, run, recipe, should_continue=should_continue, title=title)
        last = outcome["epochs"][-1]
        times = {"seconds": round(time.perf_counter() - began, 1), "epoch": last["seconds"]}
        scored = {"metrics": last["validation"], "course": course, "texts": texts}
        facts: dict[str, Any] = {**scored, "ended": ended, **times}
        scores = "  ".join(f"{name} {last['validation'][name]:.2f}" for name in SHOWN_METRICS)
        say(f"{title}: {scores}  {facts['seconds']:.0f} s{', stopped early: behind the best trial' if ended else ''}")
        write_json(place, facts)
        return Trial(contender, **facts)

    def _wait_for(self, contender: Contender) -> Trial:
        """Return the finished trial, or the trial at half-time as soon as it is there."""
        run = join(self.folder, contender.name)
        places = f"{run}.json", join(run, _HALF_TIME)
        for _ in waiting(f"the half-time of {contender.name}"):
            if there := [*filter(storage.exists, places)]:
                break
        return Trial(contender, **read_json(there[0]))

    def recipe(self, contender: Contender, minutes: float = 0.0) -> Recipe:
        """Return the recipe of a trial. Raises InputError, TableError."""
        changes = [
            *contender.changes,
            f"data.share={self.share}",
            f"data.holdout={holdout_share(self.rows)}",
            f"train.epochs={self.epochs}",
            f"encoder.dimension={_WIDTH}",
            f"encoder.hidden={2 * _WIDTH}",
            f"train.device={self.device}",
            f"train.threads={self.threads}",
            "checkpoint.every_epochs=0",
            f"train.minutes={minutes}",
            f"validation.every_epochs={-(-self.epochs // 2)}",
            f"validation.queries={QUERIES}",
            f"validation.metric={METRIC}",
            "logging.tensorboard=false",
            "logging.wandb=",
            "logging.mlflow=",
            f"refresh.start={self.epochs}",  # no table: a whole trial takes less time than the start of a miner
        ]
        return resolve(contender.recipe, applicable_overrides(contender.recipe, changes), self.data).recipe


def holdout_share(rows: int, queries: int = QUERIES) -> float:
    """Return the fraction of `rows` to hold out for `queries` queries: at most 1/20, or 1/10 if there are few rows."""
    most = min(0.1, max(0.05, _FEW_QUERIES / max(1, rows)))
    return float(f"{min(most, queries / max(1, rows)):.3g}")  # rounded as in recipes, also without rows


def best_trial(trials: Sequence[Trial]) -> Trial:
    """Return the best finished trial; the first if several are equally good.

    A dual encoder wins unless another trial leads by more than _NEAR standard errors, because trials lack hard
    negatives, which help dual encoders most. On 20,000 rows of YSO, a dual encoder reached a final P@1 of 22.9. Another
    contender led by 0.2 in the trials, but reached only 14.6.
    """
    finished = [trial for trial in trials if not trial.ended]
    best = max(finished, key=lambda trial: trial.score)
    dual = [trial for trial in finished if trial.contender.is_dual_encoder]
    leads = [best.lead(trial.course) for trial in dual]
    near = [trial for trial, (lead, error) in zip(dual, leads, strict=True) if lead <= _NEAR * error]
    return max(near, key=lambda trial: trial.score) if near else best


def write_excerpt(data: DataLayout, root: str, rows: int) -> None:
    """Write an excerpt of about `rows` training rows at `root`, unless it exists. Raises StorageError, TableError."""
    if is_published(root):
        return
    drawn, train, parts = draw_labels(data, rows), open_queries(data, "train"), []
    ids, columns = np.cumsum(drawn) - 1, [*train.columns]
    for group in ALL_ROWS.batches(train, columns, SCANNED_ROWS):
        for name in (name for name in ("filter_label_ids", "label_ids") if name in columns):
            kept = list_column(group, name)
            kept = kept.keep(drawn[kept.values])
            field = group.schema.field(name)
            column = list_array(ids[kept.values], kept.offsets, field.type.value_type)
            group = group.set_column(columns.index(name), field, column)
        parts.append(group.filter(pa.array(kept.counts > 0)))
    labels = Table.open(data.labels, "labels").rows_at(np.flatnonzero(drawn))
    publish_excerpt(data, root, pa.concat_tables(parts), labels)


def publish_excerpt(
    data: DataLayout, root: str, train: pa.Table, labels: pa.Table, frequency: np.ndarray | None = None
) -> None:
    """Publish the rows `train` and `labels`, with new ids, as a data set at `root` with DATA's tokenizer.

    `frequency` [L]: points of each label in `train`; None: labels keep their frequencies in DATA. Raises StorageError,
    TableError.
    """
    layout, source_data, parents = DataLayout(root), Table.open(data.root, "data"), dict[str, str]()
    if "tokenizer" in source_data.parents:
        tokenizer = Table.open(data.tokenizer, "tokenizer")
        for name, content in tokenizer.read_files().items():
            storage.write_bytes(join(layout.tokenizer, name), content)
        shards_here = tuple(shard.model_copy(update={"view": None}) for shard in tokenizer.shards)
        manifest = tokenizer.manifest.model_copy(update={"shards": shards_here})
        parents["tokenizer"] = publish(layout.tokenizer, manifest).digest
    whole, label_table = open_queries(data, "train"), Table.open(data.labels, "labels")
    train = train.take(pa.array(np.argsort(hash_strings(train["key"], seed_of(whole)), kind="stable")))
    counted = {**whole.parameters, "labels": labels.num_rows}
    parents["queries/train"] = _write_table(layout.queries("train"), "query_id", train, whole, counted).digest
    counted = dict(label_table.parameters)
    if frequency is not None:
        place, counted["training_points"] = labels.column_names.index("frequency"), train.num_rows
        labels = labels.set_column(place, labels.schema.field(place), pa.array(frequency))
    parents["labels"] = _write_table(layout.labels, "label_id", labels, label_table, counted).digest
    counted = {**_plain(source_data.parameters), "labels": labels.num_rows, "rows": {"train": train.num_rows}}
    publish(root, Manifest(kind="data", parents=parents, parameters=counted))


def draw_labels(data: DataLayout, rows: int) -> np.ndarray:
    """Draw labels until about `rows` training rows have a drawn label; return the drawn labels as bool [L].

    Raises TableError.
    """
    labels = Table.open(data.labels, "labels").rows
    place = generator(0, Purpose.EXCERPT).permutation(labels)
    firsts = [np.empty(0, np.int64)]  # for each row with labels, the first position of its labels in the random order
    for group in ALL_ROWS.batches(open_queries(data, "train"), ["label_ids"], SCANNED_ROWS):
        ids, offsets = list_column(group, "label_ids")
        if len(ids):
            firsts.append(np.minimum.reduceat(place[ids], offsets[:-1][np.diff(offsets) > 0]))
    first = np.concatenate(firsts)
    if len(first) <= rows:
        return np.ones(labels, bool)
    drawn: np.ndarray = place <= np.partition(first, rows - 1)[rows - 1]
    return drawn


def _write_table(url: str, key: str, rows: pa.Table, whole: Table, parameters: Mapping[str, Any]) -> Manifest:
    """Publish `rows` as a table, with new ids in the column `key`, and the row-group size of `whole`."""
    rows = rows.combine_chunks()
    place = rows.schema.get_field_index(key)
    rows = rows.set_column(place, rows.schema.field(key), pa.array(np.arange(rows.num_rows)))
    groups, ids = whole.manifest.row_group_rows or 1, (0, rows.num_rows)
    return shards.write_table(url, whole.kind, [rows], groups, parameters=_plain(parameters), id_range=ids)


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters without version parameters, because an excerpt has no version."""
    return {name: value for name, value in parameters.items() if name not in (VERSION, PARTS)}


TRIALS_FOLDER, FINALISTS_FOLDER, AUTO_REPORT, RECIPE_FILE = "trials", "finalists", "auto.json", "recipe.toml"
_HELD_OUT = 2_000  # queries held out of the final run, to fit the fusion: with 500, F1@5 on GND was 0.006 lower
_TRIALS_SHARE = 1 / 3  # share of the total time
# Time of an epoch of the final run, relative to a trial with as many rows; additional factor with a miner.
_WIDTH_FACTOR, _MINER_FACTOR = 1.9, 1.7
_RANKER_SHARE, _FUSION_SHARE = 0.3, 0.1  # shares of the remaining time
_PROCESS_BYTES = 2 << 30  # memory of a process beside its model
_RANKER_EPOCHS, _FUSION_EPOCHS = 3.0, 1.0  # time of the ranker and the fusion in epochs, until it is measured


def run_auto(
    data: str,
    run: str,
    minutes: float = 0.0,
    overrides: Sequence[str] = (),
    beam_options: Sequence[str] = (),
    resume: bool = False,
    began: float | None = None,
    pretrained: str = "",
    earlier: str = "",
    **process: Any,
) -> dict[str, Any]:
    """Choose a recipe for DATA, and train with it in RUN. `minutes` limits the total time; 0: no limit.

    `earlier`: a run whose recipe is trained instead, as an update of this run; its fusion is fitted again.
    `pretrained`: a model whose token vectors are also tried, as `encoder.pretrained`.
    `began`: reading of `time.perf_counter` at which the time limit starts; None: now. `process`: options for training
    the final run, as in `extremis.supervisor:train`.
    Returns {"chosen", "trials", "epochs", ...}. Raises ExtremisError.
    """
    require_output_folder(run, "trained", [data])
    began = time.perf_counter() if began is None else began
    remaining = RemainingTime(60 * minutes - (time.perf_counter() - began) if minutes else math.inf)
    with (
        claimed(run, "trained", say) as claim,
        logged(run) as log,
        output(remaining=remaining),
        contextlib.ExitStack() as held,
    ):
        run_exists = storage.exists(RunLayout(run).config)
        _check_request(run, run_exists, resume)
        if run_exists and (fusion := _fusion_of_finished(data, RunLayout(run))) is not None:
            _remove_trials(run)
            say(f"{run}: trained already; next: extremis evaluate {data} {run}")
            report = read_json(join(run, AUTO_REPORT))
            done = {"epochs": [], "table_versions": {}, "fusion": fusion}
            return {**report, **done, "seconds": round(time.perf_counter() - began, 1)}
        survey = Survey.of(DataLayout(data))
        for line in survey.lines():
            say(line)
        if pretrained:
            find_token_vectors(pretrained, DataLayout(data))  # refuses a model with another tokenizer before any trial
        report, epoch, again, chosen = dict[str, Any](), 0.0, dict[str, Any](), Contender("")
        fitting = {} if run_exists or earlier else _fitting(data, survey, pretrained, overrides)
        count = _count_processes(data, fitting.values())
        side = held.enter_context(Calls(count, faiss_threads(), log, process.get("grace", GRACE)))
        fit_beside = None
        if side.count > 1:  # a recipe's ranker depends on nothing that trials find out, and takes as long as they do
            first = next(iter(fitting.values()))
            seconds = 60 * minutes * (1 - _TRIALS_SHARE) * _RANKER_SHARE if minutes else math.inf
            fit_beside = side.start(partial(fit_ranker, data, first, seconds=seconds), "linear ranker")
        if run_exists:
            recipe = validate(load_config(RunLayout(run).config)["recipe"], run)
            report = read_json(join(run, AUTO_REPORT))
        else:
            if earlier:
                again, resolved = _continue(data, earlier, overrides)
            else:
                report, chosen, epoch = _choose(data, run, survey, fitting, overrides, minutes, remaining, side)
                resolved = _resolve(data, chosen, survey.facts.queries, overrides)
            facts = measure_rows(resolved.recipe, data)
            say(f"training on {facts.described_points}; {survey.facts.queries - facts.queries:,} points are held out")
            for line in resolved.reasons:
                say(line)
            recipe = resolved.recipe
        spent, compares = time.perf_counter() - began, False
        fits = not recipe.train.start_from or _refits_fusion(data, recipe)
        show_activity("fitting a linear ranker on words")
        full = epoch * (recipe.train.epochs + _FUSION_EPOCHS)  # seconds of a finalist
        in_row = 1 if side.count > 1 or not chosen.recipe else 2  # finalists
        remaining.begin(epoch * _RANKER_EPOCHS, lambda own: full * in_row)
        seconds = max(0.0, 60 * minutes - spent) * _RANKER_SHARE if minutes else math.inf
        fit = fit_beside or partial(fit_ranker, data, recipe, seconds=seconds)
        ranker = fit() if fits else None
        if not run_exists:
            now = time.perf_counter() - began
            compares = bool(chosen.recipe) and not (minutes and now + in_row * full > 60 * minutes)
            if chosen.recipe and not compares:
                say("one finalist alone is trained, because no time is left for another")
            recipe = _limit_training(recipe, minutes, epoch, now, now - spent, in_row if compares else 1)

        def train_in(place: str, recipe: Recipe, later: int, **names: Any) -> Callable[[], Finalist]:
            """Return the call that trains a finalist; after it come the fusion, and `later` finalists."""
            remaining.begin(epoch * recipe.train.epochs, lambda own: epoch * _FUSION_EPOCHS + later * full)
            options = {**process, "resume": True, "beam_options": beam_options, **names}
            return partial(train_finalist, data, place, recipe, ranker, seconds, fits, **options)

        def record(recipe: Recipe) -> None:
            claim.require()
            write_json(join(run, AUTO_REPORT), report, indent=1)
            body = again or recipe.model_dump(mode="json")  # can be used like any other recipe
            storage.write_bytes(join(run, RECIPE_FILE), tomli_w.dumps(body).encode())

        if compares:
            final = _train_finalists(data, run, recipe, chosen, survey, overrides, report, train_in, side)
            record(final.recipe)
            move_run(final.place, run)
        else:
            if not run_exists:
                record(recipe)
            final = train_in(run, recipe, 0)()
        _remove_trials(run)
        if not fits:
            carry(data, run, recipe.train.start_from, recipe.train.device)
            say(f"{run}: trained; next: extremis evaluate {data} {run}")
            return {**final.outcome, "seconds": round(time.perf_counter() - began, 1)}
        for line in (*describe_fusion(final.fusion), f"next: extremis evaluate {data} {run}"):
            say(line)
        return {**report, **final.outcome, "fusion": final.fusion, "seconds": round(time.perf_counter() - began, 1)}


def _check_request(run: str, run_exists: bool, resume: bool) -> None:
    """Raise InputError for requests that `auto` cannot fulfil, before anything is written."""
    ranks = ranks_of_environment().ranks
    if ranks > 1:
        raise InputError(
            f"auto tries recipes in one process, but {ranks} processes were launched. Run auto without torchrun, then "
            f"train its recipe {join(run, RECIPE_FILE)} with torchrun into another RUN."
        )
    if run_exists and not resume:
        raise InputError(f"{run}: a run exists here already. Give {option('resume', True)}, or another RUN.")
    if run_exists and not storage.exists(join(run, AUTO_REPORT)):
        raise InputError(
            f"{run}: this run was not started by auto. Continue it with its own recipe, or choose another RUN."
        )


def _fusion_of_finished(data: str, run: RunLayout) -> dict[str, Any] | None:
    """Return the facts of the fusion of a finished run's best checkpoint; None if a resume has work left.

    Raises InputError if the run was trained on other data.
    """
    require_same_data(load_config(run.config), Table.open(data, "data").manifest, data, run.root)
    if not storage.exists(run.finished) or (step := best_step(run)) is None or not is_published(run.fusion(step)):
        return None
    return open_manifest(run.fusion(step), "fusion").parameters


def _remove_trials(run: str) -> None:
    for folder in (FINALISTS_FOLDER, TRIALS_FOLDER):
        storage.remove(join(run, folder), recursive=True)


def _fitting(data: str, survey: Survey, pretrained: str, overrides: Sequence[str]) -> dict[Contender, Recipe]:
    """Return the contenders that accept `overrides`, with recipes at full length. Raises InputError if none do."""
    fitting, faults = dict[Contender, Recipe](), list[InputError]()
    for contender in contenders(survey, pretrained):
        try:
            fitting[contender] = _resolve(data, contender, survey.facts.queries, overrides).recipe
        except InputError as error:
            faults.append(error)
    if not fitting:
        raise faults[0]
    for fault in faults:
        say(f"not tried: {fault}")
    return fitting


def _count_processes(data: str, recipes: Collection[Recipe]) -> int:
    """Return how many calls are made side by side: a call per thread, as far as memory allows.

    One on a GPU, and if a recipe has its own number of threads.
    """
    if not recipes or any(open_device(each.train.device) != CPU or each.train.threads for each in recipes):
        return 1
    sizes = DataSizes.of(DataLayout(data))
    model = max(encoder_bytes(each, sizes) + sizes.labels * sum(label_bytes(each)) for each in recipes)
    return max(1, min(faiss_threads(), len(recipes) + 1, free_memory() // (_PROCESS_BYTES + 3 * model)))


def _choose(
    data: str,
    run: str,
    survey: Survey,
    fitting: Mapping[Contender, Recipe],
    overrides: Sequence[str],
    minutes: float,
    remaining: RemainingTime,
    side: Calls,
) -> tuple[dict[str, Any], Contender, float]:
    """Try the contenders, then variations of the best; return a report, the winner, and seconds of a full epoch.

    `fitting`: the contenders with their recipes at full length. Trials use only a fraction of `minutes` (0: no limit).
    When this time is used up, no more contenders are tried.
    """
    rows, began = survey.facts.queries, time.perf_counter()
    first = next(iter(fitting.values()))
    trial_data = TrialData.prepare(data, survey, join(run, TRIALS_FOLDER), first.train.device, first.train.threads)
    trials = list[Trial]()

    def epoch_seconds(seconds: float, recipe: Recipe) -> float:
        """Estimate the seconds of an epoch of `recipe` over all rows; `seconds`: an epoch of the recipe's trial."""
        return seconds * rows / trial_data.rows * _WIDTH_FACTOR * (_MINER_FACTOR if recipe.table_epochs() else 1.0)

    def run_trials(kinds: Sequence[Contender], further: int) -> None:
        """Try some contenders side by side; `further`: number of later ones."""
        left = minutes * _TRIALS_SHARE - (time.perf_counter() - began) / 60
        if trials and minutes and left <= 0:
            say(f"not tried, because no time is left: {', '.join(kind.name for kind in kinds)}")
            return
        to_come = len(kinds) + further
        rounds = to_come / min(side.count, len(kinds))

        def after(own: float) -> float:
            """Estimate the seconds after these trials, which take `own` seconds."""
            leader = best_trial(trials) if trials else None
            recipe = fitting.get(leader.contender if leader else kinds[0], first)
            epoch = epoch_seconds(leader.epoch if leader else own / trial_data.epochs, recipe)
            return (rounds - 1) * own + epoch * (recipe.train.epochs + _RANKER_EPOCHS + _FUSION_EPOCHS)

        remaining.begin(statistics.median(trial.seconds for trial in trials) if trials else 0.0, after)
        begun, ends = [trial.contender for trial in trials], list[Callable[[], Trial]]()
        with side.bar("trials"):
            for contender in kinds:
                title = f"trial {len(begun) + 1} of {len(trials) + to_come}, {contender.name}"
                share = max(left / rounds, 0.05) if minutes else 0.0
                work = partial(trial_data.run_trial, contender, title, tuple(begun), share)
                ends.append(side.start(work, title))
                begun.append(contender)
            trials.extend([end() for end in ends])

    def run_waves(kinds: Sequence[Contender], further: int) -> None:
        """Try contenders side by side or, since time may run out in between, in a row."""
        size = len(kinds) if side.count > 1 else 1
        for start in range(0, len(kinds), size):
            run_trials(kinds[start : start + size], further + len(kinds) - start - size)

    run_waves(list(fitting), len(_NGRAM_WEIGHTS) - 1)  # the nearest weight is not a variation
    best = best_trial(trials).contender
    weight = _resolve(data, best, rows, overrides).recipe.encoder.model_dump().get("ngram_weight", 1.0)
    run_waves(variations(best, weight), 0)
    chosen = best_trial(trials)
    say(f"chosen: {chosen.contender.name}")
    if minutes and len(trials) == 1:
        say(f"odd: no other recipe was tried. Raise {option('minutes')} to compare recipes")
    tried = []
    for trial in trials:
        metrics = {name: round(trial.metrics[name], 2) for name in SHOWN_METRICS}
        ended = {"ended": True} if trial.ended else {}
        tried.append({"recipe": trial.contender.recipe, "changes": list(trial.contender.changes), **metrics, **ended})
    by_trials: dict[str, Any] = {"recipe": chosen.contender.recipe, "changes": [*chosen.contender.changes]}
    report = {"chosen": by_trials["recipe"], "changes": by_trials["changes"], "finalists": [by_trials], "trials": tried}
    full = epoch_seconds(chosen.epoch, _resolve(data, chosen.contender, rows, overrides).recipe)
    return report, chosen.contender, full


def _train_finalists(
    data: str,
    run: str,
    recipe: Recipe,
    chosen: Contender,
    survey: Survey,
    overrides: Sequence[str],
    report: dict[str, Any],
    train_in: Callable[..., Callable[[], Finalist]],
    side: Calls,
) -> Finalist:
    """Train `recipe` and a second finalist, if there is one; return the winner, and say and report why it won."""
    places, name, second = [join(run, FINALISTS_FOLDER, number) for number in "12"], "", chosen

    def begin_second(peaked_first: bool) -> Callable[[], Finalist] | None:
        nonlocal name, second
        name, second = propose_second(chosen, recipe, survey, peaked_first)
        try:
            limited = second.changed(f"train.minutes={recipe.train.minutes}")
            other = _resolve(data, limited, survey.facts.queries, overrides).recipe
        except InputError as error:
            name, other = str(error), recipe
        if other == recipe:
            say(f"no second finalist: {name}")
            return None
        say(f"second finalist, {name}: {second.recipe} with {', '.join(second.changes)}")
        quiet = {"metrics": None} if side.count > 1 else {}  # the port is the first one's
        return side.start(train_in(places[1], other, 0, title="finalist 2", **quiet), "finalist 2", 2)

    train_first = side.start(train_in(places[0], recipe, int(side.count == 1), title="finalist 1"), "finalist 1", 2)
    train_second = begin_second(False) if side.count > 1 else None
    with side.bar("first finalist" if train_second is None else "finalists"):
        first = train_first()
    if first.peaked_first:
        say("odd: the first epoch was the best, by more than chance: its rates are too high, or it fits too much")
        side.end()
        storage.remove(places[1], recursive=True)
    if first.peaked_first or side.count == 1:
        train_second = begin_second(first.peaked_first)
    if train_second is None:
        return first
    try:
        with side.bar("second finalist"):
            other = train_second()
    except (DivergedError, InputError) as error:
        say(f"the second finalist failed, so the first is the final run: {error}")
        return first
    wins, why = other.replaces(first)
    say(f"{name}: {why}: {'the final run' if wins else 'not better by enough, so the cheaper is the final run'}")
    report["finalists"].append({"recipe": second.recipe, "changes": [*second.changes]})
    report["compared"] = why
    if wins:
        report |= {"chosen": second.recipe, "changes": [*second.changes]}
    return other if wins else first


def _resolve(data: str, contender: Contender, rows: int, overrides: Sequence[str]) -> Resolved:
    """Resolve the contender's recipe for training on all rows except the held-out rows."""
    waits = applicable_overrides(contender.recipe, [WAIT_FOR_TABLES]) if WAIT_FOR_TABLES in overrides else []
    changes = [
        *contender.changes,
        f"data.holdout={holdout_share(rows, _HELD_OUT)}",
        f"validation.metric={METRIC}",
        "checkpoint.keep=1",
        "validation.patience=2",
        *(each for each in overrides if each != WAIT_FOR_TABLES),
        *waits,
    ]
    return resolve(contender.recipe, changes, data)


def _continue(data: str, earlier: str, overrides: Sequence[str]) -> tuple[dict[str, Any], Resolved]:
    """Return the recipe of the run `earlier`, from scratch and as an update. Raises InputError, TableError."""
    recipe, _, _ = find_earlier(DataLayout(data), RunLayout(earlier))
    source = _find_recipe(earlier)
    resolved = resolve(source, ["train.minutes=0", f"data.holdout={recipe.data.holdout}", *overrides], data)
    say(f"continues {earlier} with its recipe, {recipe.title}, without trials")
    return read_recipe(source), resolved


def _find_recipe(run: str) -> str:
    """Return the file with the recipe of a run, or of the first run that it continues. Raises InputError."""
    kept, config = join(run, RECIPE_FILE), RunLayout(run).config
    if storage.exists(kept):
        return kept
    if not storage.exists(config):
        raise InputError(f"{run}: this run began the series, and is gone with its recipe. Give the recipe, not auto.")
    earlier = load_config(config)["recipe"]["train"].get("start_from")
    return _find_recipe(earlier) if earlier else config


def _refits_fusion(data: str, recipe: Recipe) -> bool:
    """Return whether the fusion of the earlier run is fitted again: it needs rows that the run is not trained on."""
    earlier = recipe.train.start_from
    layout = RunLayout(earlier)
    _, before, _ = find_earlier(DataLayout(data), layout, layout.scored_step())
    if not is_published(layout.fusion(before.step)):
        say(f"{earlier} has no fusion, so no fusion is fitted")
        return False
    refits = bool(recipe.data.holdout) or "queries/val" in Table.open(data, "data").parents
    kept = "is kept, because no rows are held out and there is no split val"
    say(f"the fusion of {earlier} {'is fitted again, with ranker and memory' if refits else kept}")
    return refits


def _limit_training(
    recipe: Recipe, minutes: float, epoch: float, spent: float, of_ranker: float, finalists: int = 1
) -> Recipe:
    """Limit training so that time for the fusion remains within `minutes` (0: no limit); `spent` seconds have passed.

    The fusion embeds all rows once, and may fit the ranker again, which took `of_ranker` seconds. Training takes at
    least two epochs, so that learning rates fall to their final values. Prints a line if these exceed the limit.
    """
    if not minutes:
        return recipe
    left = (60 * minutes - spent) / finalists - (of_ranker if recipe.data.holdout > REFIT_HOLDOUT else 0.0)
    left -= max(_FUSION_SHARE * left, _FUSION_EPOCHS * epoch)
    needed = minutes + (2 * epoch - left) / 60
    if needed > 1.1 * minutes:
        say(
            f"{option('minutes', minutes)} is too short: training takes at least two epochs, so the whole run takes "
            f"about {needed:.1f} minutes"
        )
    left = max(0.1, left / 60)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"minutes": left})})
