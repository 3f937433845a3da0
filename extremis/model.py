"""An export as a model in this process: labels for texts, embeddings, and the labels themselves."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from extremis.command import naming_arguments
from extremis.console import without_controls
from extremis.result import html_table
from pipelines.sharding.tokenizer import FILE, encode_whole, open_tokenizer
from schemas import PAD
from schemas.errors import InputError
from schemas.shard_files import parquet
from schemas.text_model import DENSE
from schemas.version import follow
from search.nearest import find_device
from trainer.export.exported import ENCODER, Exported, use_threads

_BATCH = 256  # texts at a time
_EMBEDDER = "Name a place of the same model: --embedder MODEL, or extremis.load(export, embedder=MODEL)."


@dataclass(frozen=True)
class Label:
    """A label as it is predicted: the key and the text of the data, and its score, where it has one."""

    key: str
    text: str
    score: float | None = None


@dataclass(frozen=True)
class Prediction:
    """The best labels of a text, best first."""

    text: str
    labels: tuple[Label, ...]


class Predictions(list[Prediction]):
    """One prediction a text, in their order; a table in a notebook."""

    def __repr__(self) -> str:
        blocks = []
        for prediction in self:
            lines = [f"  {label.score:9.4f}  {label.key}  {label.text}" for label in prediction.labels]
            blocks.append("\n".join([prediction.text, *lines]))
        return without_controls("\n".join(blocks))

    def _repr_html_(self) -> str:
        pairs = ((prediction.text, label) for prediction in self for label in prediction.labels)
        rows = [[text, label.key, label.text, f"{label.score:.4f}"] for text, label in pairs]
        return html_table(["text", "key", "label", "score"], rows)


class Labels(Sequence[Label]):
    """All labels of a model; a label's place is its id."""

    def __init__(self, table: pa.Table) -> None:
        self._keys, self._texts = (table[name].combine_chunks() for name in ("key", "text"))

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, place: int) -> Label:  # type: ignore[override]
        return Label(self._keys[place].as_py(), self._texts[place].as_py() or "")

    def __repr__(self) -> str:
        first = ", ".join(repr(self[place].key) for place in range(min(3, len(self))))
        return f"{len(self):,} labels: {first}, …"

    @property
    def keys(self) -> list[str]:
        """Keys of all labels, by id."""
        return self._keys.to_pylist()

    @property
    def texts(self) -> list[str]:
        """Texts of all labels, by id."""
        return self._texts.to_pylist()


class Model:
    """An export that is open: `predict`, `embed`, `labels`. It stays what it is, whatever becomes current later."""

    def __init__(self, exported: Exported, place: str, embedder: str | None = None) -> None:
        self._exported, self._place = exported, place
        if "feature_ids" in exported.serving.columns:
            raise InputError(
                f"{exported.table.url}: its encoder reads sparse features, not texts alone: use extremis.predict."
            )
        self._embed = open_embedder(exported, embedder)
        if self._embed is None and DENSE in exported.serving.columns:
            raise InputError(
                f"{exported.table.url}: its encoder reads vectors of your own, not texts alone: use extremis.predict."
            )
        self._tokenizer = tokenizer_of(exported)

    def __repr__(self) -> str:
        dimension, step = (self._exported.table.parameters[name] for name in ("dimension", "step"))
        return f"{self._exported.table.url}: {len(self.labels):,} labels, {dimension} dimensions, step {step:,}"

    @property
    def url(self) -> str:
        """URL of the export: of a folder, the one that was current when it was opened."""
        return self._exported.table.url

    @property
    def is_current(self) -> bool:
        """False where the folder that was opened has another current export by now: `load` it again."""
        return follow(self._place) == self.url

    @functools.cached_property
    def labels(self) -> Labels:
        """The labels, by id."""
        return Labels(self._exported.label_table(("key", "text")))

    @naming_arguments()
    def predict(
        self, texts: str | Sequence[str], k: int = 5, *, threshold: float | None = None, precision: float | None = None
    ) -> Predictions:
        """Return the best `k` labels of each text, of score `threshold` or more; `precision`: of the export's for it.

        Raises InputError: no threshold for this precision, or both are stated.
        """
        if threshold is not None and precision is not None:
            raise InputError("threshold and precision both set the lowest score. Give one of them.")
        if precision is not None:
            threshold = self._exported.threshold(precision)
        lowest = -np.inf if threshold is None else threshold
        predictions = Predictions()
        for part, rows in self._batches(texts):
            scores, ids = self._exported.serving.rank(rows, k)
            for text, of_text, best in zip(part, scores.tolist(), ids.tolist(), strict=True):
                pairs = zip(of_text, best, strict=True)
                kept = [(score, place) for score, place in pairs if place != PAD and score >= lowest]
                labels = ((self.labels[place], score) for score, place in kept)
                predictions.append(Prediction(text, tuple(Label(each.key, each.text, score) for each, score in labels)))
        return predictions

    def explain(self, text: str, label: int) -> list[tuple[str, float]]:
        """Return words and pairs of words of a text and what each adds to the linear ranker's score of a label's id.

        Greatest first; empty where the export has no linear ranker, or none of the words has a weight. Raises
        InputError: no such label.
        """
        if not 0 <= label < len(self.labels):
            raise InputError(f"label = {label}: expected the id of one of {len(self.labels):,} labels, from 0 on.")
        fused = self._exported.serving.fused
        if fused is None or fused.scorers.linear is None:
            return []
        ((_, rows),) = self._batches(text)
        found = fused.scorers.linear.explain(parquet.list_column(rows, "input_ids").entries, label)
        return [(" ".join(str(self._tokenizer.id_to_token(word)) for word in name), added) for name, added in found]

    def embed(self, texts: str | Sequence[str]) -> np.ndarray:
        """Embed texts: x float32 [N, D], as the vectors of labels are scored against it."""
        parts = [self._exported.serving.embed(rows) for _, rows in self._batches(texts)]
        dimension = int(self._exported.table.parameters["dimension"])
        return np.concatenate(parts) if parts else np.zeros((0, dimension), np.float32)

    def _batches(self, texts: str | Sequence[str]) -> Iterator[tuple[list[str], pa.Table]]:
        """Yield parts of the texts, with the rows that the encoder reads. Raises InputError for what is no text."""
        listed = [texts] if isinstance(texts, str) else [*texts]
        for place, text in enumerate(listed):
            if not isinstance(text, str):
                raise InputError(f"texts[{place}] is no string, but {type(text).__name__}: {text!r:.80}")
        for start in range(0, len(listed), _BATCH):
            part = listed[start : start + _BATCH]
            dense = {} if self._embed is None else {DENSE: self._embed(pa.array(part, pa.string()))}
            yield part, pa.table({"input_ids": token_column(self._tokenizer, part, self.url), **dense})


@naming_arguments()
def load(
    export: str | PathLike[str],
    *,
    exact: bool = False,
    threads: int | None = None,
    embedder: str | PathLike[str] | None = None,
) -> Model:
    """Open the export at `export`, a directory or an object-store prefix, or the current one of a folder.

    `exact`: score every label, without an index. `threads`: None is all cores. `embedder`: another place of the model
    that made the dense vectors of DATA.
    Raises TableError: no export there, or a damaged one; InputError: no such model, or another one; StorageError.
    """
    place = None if embedder is None else str(embedder)
    return Model(open_exported(str(export), exact, threads), str(export), place)


def open_exported(url: str, exact: bool = False, threads: int | None = None, device: str = "auto") -> Exported:
    """Open the export at `url` on `device`, to be searched by `threads` threads.

    Raises InputError: no such device; TableError, StorageError.
    """
    exported = Exported.open(url, exact, find_device(device))
    use_threads(threads)
    return exported


def open_embedder(exported: Exported, place: str | None = None) -> Callable[[pa.Array], pa.Array] | None:
    """Open the model of the dense vectors that an export's encoder reads: by its name, or at `place`.

    It makes a column of vectors of texts. None where there is none. Raises InputError: no such model, or another one.
    """
    stated = exported.dense_model if DENSE in exported.serving.columns else None
    if stated is None:
        if place is not None:
            raise InputError(f"--embedder {place}: {exported.table.url} needs no model of texts. Leave it out.")
        return None
    from pipelines.models import dense_column
    from trainer.encoders.texts import TextFiles

    url, model = exported.table.url, replace(stated, name=place or stated.name)
    try:
        files = TextFiles.find(model.name)
    except InputError as error:
        raise InputError(f"{url}: its encoder reads vectors of a model: {error} {_EMBEDDER}") from None
    if files.digest != stated.digest:
        raise InputError(
            f"{url}: its encoder reads vectors of the model {stated.name} (digest {stated.digest[:12]}…), and "
            f"{model.name} is another one (digest {files.digest[:12]}…). {_EMBEDDER}"
        )
    return functools.partial(dense_column, model.embedder("queries"), dimension=exported.table.parameters[DENSE])


def tokenizer_of(exported: Exported) -> Tokenizer:
    """Open the tokenizer of an export whose encoder reads tokens."""
    place = exported.files.folder / ENCODER / FILE
    return open_tokenizer(place.read_bytes(), str(place))


def token_column(tokenizer: Tokenizer, texts: Sequence[str], url: str) -> pa.ListArray:
    """Return the column `input_ids` of `texts`, for the export at `url`. Raises InputError."""
    values, offsets, _ = encode_whole(tokenizer, texts, f"of {url}")
    return parquet.list_array(values, offsets, pa.uint32())
