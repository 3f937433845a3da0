"""Options of what is made of a run: a command reads them before PyTorch is loaded."""

from collections.abc import Mapping
from os import PathLike
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SkipValidation
from pydantic_core import PydanticCustomError

from schemas.options import COMMAS, AnyDevice, Options, Place, Shown
from scoring import QUERIES, SHORTLIST

# What a decision may be given as, which `read_decision` checks; of options, a Decision.
Source = Options | Mapping[str, object] | str | PathLike[str] | None


def _step(value: Any) -> Any:
    if value == "newest" or not isinstance(value, str):
        return value
    if not value.isdigit():
        raise PydanticCustomError("step", "input should be a number, or newest")
    return int(value)


Step = Annotated[int | str, BeforeValidator(_step), Shown("N|newest")]
_STEP = "Step of the checkpoint. Default: the step of the newest fusion, else the best on validation, else the newest."


class RunOptions(Options):
    """Options of what a command makes of a run."""

    step: Step | None = Field(None, description=_STEP)
    device: AnyDevice = "auto"


def _keys(value: Any) -> Any:
    """Return the keys of labels in a text: one a line of the file after an @, or between commas."""
    if not isinstance(value, str) or not value.startswith("@"):
        return COMMAS.func(value)  # type: ignore[call-arg]
    from schemas import storage

    try:
        return [line for line in storage.read_bytes(value[1:]).decode().splitlines() if line]
    except (FileNotFoundError, UnicodeDecodeError):
        raise PydanticCustomError("keys", "input should be @ and a file of keys of labels, one a line") from None


Keys = Annotated[tuple[str, ...], BeforeValidator(_keys), Shown("KEY,...|@FILE")]
Share = Annotated[float, Field(gt=0, le=1)]


class DecisionLimits(Options):
    """How many labels of a text are given, and which."""

    HEADING: ClassVar[str] = "Which labels are given"

    max_labels: Annotated[int, Field(ge=1)] | None = Field(None, description="Greatest number of labels of a text.")
    min_probability: Share | None = Field(
        None, description="Lowest probability of a label; all labels above it are given."
    )
    precision: Share | None = Field(
        None,
        description="Share of the given labels that is correct, as far as held-out rows show it (95 %): all labels "
        "from the lowest score at which it is. Instead of {min_probability}.",
    )
    at_least: int = Field(0, ge=0, description="Number of best labels that are given even below the limit.")
    allowed: Keys | None = Field(None, description="The only labels that may be given. Default: all labels.")
    never: Keys = Field((), description="Labels that are never given.")


class DecisionOptions(DecisionLimits):
    """A decision, or a file with one."""

    decision: Annotated[Source, SkipValidation, Shown("FILE", place=True)] = Field(
        None, description="TOML file with a decision, which may also have groups of labels of which one is given."
    )


class EvaluateOptions(RunOptions, DecisionOptions):
    """Options of `extremis evaluate`."""

    split: str = Field("test", description="A split of DATA, or holdout, the rows that were held out of training.")
    limit: int | None = Field(
        None, ge=1, description="Number of queries to score, from the start of the split. Default: all."
    )
    no_filter: bool = Field(False, description="Do not remove pairs in the filter file from the predictions.")
    k: Annotated[tuple[Annotated[int, Field(ge=1, le=1000)], ...], COMMAS, Shown("K,...")] = Field(
        (), description="Additional values of k, e.g. 20,100; at most 1000."
    )
    zero_shot: bool = Field(False, description="Also score the labels without training points separately.")
    seen_only: bool = Field(False, description="Rank only labels with training points. Default: all labels.")
    scores: Literal["classifier", "labels", "sum", "fused"] | None = Field(
        None,
        description="Scores to rank by: classifier (label vectors), labels (embeddings of the labels' texts), sum (of "
        "both), or fused (extremis fuse). Default: fused, if the checkpoint has a fusion.",
    )
    baseline: bool = Field(
        False,
        description="Also score baselines on the same queries: popular labels, nearest texts by TF-IDF, a linear "
        "ranker, labels' names in the text.",
    )
    calibrate: bool = Field(
        False,
        description="Also evaluate probabilities, from the curve that an export has: fitted on val or, if there is no "
        "val, on the held-out rows of RUN. Needs scikit-learn (extra trainer).",
    )
    labels: Annotated[Place, Shown("FILE", place=True)] | None = Field(
        None,
        description="Table to write, .csv or .parquet: for each label, its figures at the decision, the labels that it "
        "is confused with, and an example of each kind of error.",
    )
    overwrite: bool = Field(False, description="Replace an existing file of {labels}.")
    out: Annotated[Place, Shown("FOLDER", place=True)] | None = Field(
        None,
        description="Folder to keep the results in. Default: RUN, for `extremis report`, if all queries and labels of "
        "{split} are scored by the default scores.",
    )
    save: bool = Field(True, description="Keep the results in RUN.")

    @property
    def is_standard(self) -> bool:
        """Whether all queries and labels are included, the filter applies, and `scores` has its default."""
        return self.limit is None and not (self.no_filter or self.seen_only or self.scores)


class FitOptions(RunOptions):
    """Options for fitting a fusion."""

    split: str | None = Field(
        None,
        description="Split to learn on, which must not contain rows that RUN was trained on. Default: the held-out "
        "rows of RUN, or val.",
    )
    step: Step | None = Field(
        None, description="Step of the checkpoint. Default: the best on validation, else the newest."
    )
    shortlist: int = Field(SHORTLIST, ge=1, description="Number of best labels per query to rank again.")
    queries: int = Field(
        QUERIES, ge=1, description="Number of queries to learn from, at most 3,000 without a score of your own."
    )


class ExportOptions(RunOptions, DecisionOptions):
    """Options of `extremis export`."""

    dtype: Literal["float32", "float16"] = Field("float32", description="Number type of the vectors.")
    form: Literal["auto", "torch", "onnx", "onnx-int8"] = Field(
        "auto",
        description="Format of a transformer: torch; onnx, a graph with the same embeddings as in PyTorch (extra "
        "onnx); onnx-int8, a graph with 8-bit numbers. Default: the format of EXPORT ({onto}), else torch.",
    )
    index: str = Field(
        "auto",
        description="none, auto (none up to 131,072 labels, else the cheapest for {purpose}), or a Faiss factory "
        "string such as HNSW32.",
    )
    purpose: Literal["serving", "batch"] = Field(
        "serving",
        description="What an index is chosen for by auto: serving, one query at a time, or batch, many queries.",
    )
    target_recall: float = Field(0.98, gt=0, le=1, description="Recall for which the index is tuned.")
    calibration_split: str | None = Field(
        None,
        description="Split to learn probabilities on, which RUN was not trained on, or none. Default: val, else the "
        "held-out rows of RUN. Needs scikit-learn (extra trainer).",
    )
    scores: Literal["classifier", "sum", "fused"] | None = Field(
        None,
        description="sum adds the embeddings of the labels' texts to the vectors; fused uses the result of `extremis "
        "fuse`. Default: fused, if the checkpoint has a fusion.",
    )
    license: str | None = Field(
        None, pattern=r"^[\w.-]+$", description="License of the data, which the card of the export states: cc0-1.0."
    )
    language: Annotated[tuple[str, ...], COMMAS, Shown("CODE,...")] = Field(
        (), description="Languages of the texts, which the card states: en,sv."
    )
    onto: Annotated[Place, Shown("EXPORT", place=True)] | None = Field(
        None,
        description="Earlier export that OUT refers to; for a folder of exports, its current export.",
    )
    overwrite: bool = Field(False, description="Replace an existing export of another run, or with other options.")


Form = Literal["triplets", "tuples", "pairs", "lists", "tevatron", "flagembedding"]


class TupleOptions(Options):
    """Options of `extremis tuples` and of a `TupleStream`."""

    form: Form = Field("tuples", description="Columns of an example, or the library that reads the file.")
    negatives: int | None = Field(
        None, ge=1, description="Number of negatives per example, best first. Default: 1 in triplets, otherwise all."
    )
    keys: bool = Field(False, description="Write keys instead of texts.")
    each_positive: bool = Field(
        False,
        description=(
            "Write an example for each positive of a row. Default: use one positive of each row, and a different "
            "positive in each epoch."
        ),
    )
    scores: Literal["search", "teacher"] | None = Field(
        None,
        description=("Write scores instead of labels: scores from the search, or from a teacher (null for positives)."),
    )
    seed: int = Field(0, ge=0, lt=1 << 64, description="Seed of the order and of the choice of positives.")
