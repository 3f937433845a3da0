"""An open export as a model: predicts labels for texts, embeds texts, and lists all labels."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from extremis.objects import html_table, input_url, items_of, require_texts
from pipelines.formats.names import Fields, parse_fields_by_table
from pipelines.sharding.tokenizer import FILE, encode_texts, open_tokenizer
from schemas.errors import InputError
from schemas.options import whole_number
from schemas.ragged import Ragged, counts_of, offsets_of
from schemas.secrets import without_controls
from schemas.text_model import DENSE
from schemas.waits import Say
from search.nearest import find_device
from trainer.evaluation.fusion import FusionWeights
from trainer.evaluation.votes import shares_of
from trainer.export.exported import ENCODER, Exported, resolve_export, use_threads
from trainer.inputs import Inputs

_BATCH = 512  # texts per batch
_EMBEDDER = "Give a path or hub name of the same model: --embedder MODEL, or extremis.load(export, embedder=MODEL)."


@dataclass(frozen=True)
class Label:
    """A label: key, text, and score if it is a prediction.

    `probability`: the probability that the label is correct, if the export is calibrated.
    """

    key: str
    text: str
    score: float | None = None
    probability: float | None = None


@dataclass(frozen=True)
class Prediction:
    """The best labels of a text, best first; the most frequent labels if `known_tokens` is 0.

    `none_of_these`: True if even the best label is probably incorrect; None if the export is not calibrated.
    """

    text: str
    labels: tuple[Label, ...]
    known_tokens: int
    none_of_these: bool | None = None


@dataclass(frozen=True)
class Explanation:
    """Terms that add up to a label's score: `parts` by source, with details in `words` and `points`.

    "vector": the label's vector; "text": the embedding of the label's text; "points": votes of nearby training points;
    "words": the linear ranker; "tree": the tree of `extremis fuse --by tree`; "prior": for a text without known tokens.
    `words`: (a word or two neighbouring words, contribution to the score); `points`: (key, cosine, contribution).
    """

    score: float
    parts: dict[str, float]
    words: list[tuple[str, float]] = field(default_factory=list)
    points: list[tuple[str, float, float]] = field(default_factory=list)


class Predictions(list[Prediction]):
    """One prediction per text, in the order of the texts; shown as a table in a notebook."""

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
    """All labels of a model, indexed by label id."""

    def __init__(self, table: pa.Table) -> None:
        self._keys, self._texts = (table[name].combine_chunks() for name in ("key", "text"))

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, label_id: int) -> Label:  # type: ignore[override]
        return Label(self._keys[label_id].as_py(), self._texts[label_id].as_py() or "")

    def scored(self, ids: np.ndarray, *numbers: np.ndarray) -> list[Label]:
        """Return the labels `ids` int64 [n] with their scores [n], and their probabilities [n] if given."""
        columns = zip(ids.tolist(), *(column.tolist() for column in numbers), strict=True)
        return [Label(self._keys[n].as_py(), self._texts[n].as_py() or "", *scores) for n, *scores in columns]

    def __repr__(self) -> str:
        first = ", ".join(repr(self[n].key) for n in range(min(3, len(self))))
        return f"{len(self):,} labels: {first}, …"

    def ids(self, keys: Sequence[str]) -> list[int]:
        """Return the ids of the labels with these `keys`. Raises InputError if a label does not exist."""
        try:
            return [self._ids[key] for key in keys]
        except (KeyError, TypeError) as error:
            raise InputError(f"unknown label key {error}.") from None

    def known_ids(self, keys: Sequence[str]) -> list[int]:
        """Return the ids of the labels with these `keys`; keys that are not labels are left out."""
        return [self._ids[key] for key in keys if key in self._ids]

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {key: label_id for label_id, key in enumerate(self.keys)}

    @property
    def keys(self) -> list[str]:
        """Keys of all labels, by id."""
        return self._keys.to_pylist()

    @property
    def texts(self) -> list[str]:
        """Texts of all labels, by id."""
        return self._texts.to_pylist()


class Model:
    """An open export with `predict`, `embed` and `labels`. It stays the same when another export becomes current."""

    def __init__(self, exported: Exported, place: str, embedder: str | None = None, say: Say = print) -> None:
        self._exported, self._place, self._say = exported, place, say
        columns, self._embed = exported.serving.columns, open_embedder(exported, embedder)
        if "feature_ids" in columns or (self._embed is None and DENSE in columns):
            needed = "sparse features" if "feature_ids" in columns else "your own vectors"
            raise InputError(f"{exported.table.url}: the encoder needs {needed}, not only texts. Use extremis.predict.")
        self._tokenizer = TextTokenizer.of(exported)

    def __repr__(self) -> str:
        dimension, step = (self._exported.table.parameters[name] for name in ("dimension", "step"))
        return f"{self._exported.table.url}: {len(self.labels):,} labels, {dimension} dimensions, step {step:,}"

    @property
    def url(self) -> str:
        """URL of the export; if a folder was opened, URL of the export that was current at that time."""
        return self._exported.table.url

    @property
    def is_current(self) -> bool:
        """False if the opened folder now has another current export; `load` the folder again to use that export."""
        return resolve_export(self._place) == self.url

    @functools.cached_property
    def labels(self) -> Labels:
        """All labels, by id."""
        return Labels(self._exported.label_table(("key", "text")))

    def predict(
        self,
        texts: Any,
        k: int = 5,
        *,
        threshold: float | None = None,
        precision: float | None = None,
        filter: Iterable[str] | Iterable[Iterable[str]] = (),
    ) -> Predictions:
        """Return the best `k` labels of each text that score at least `threshold`, or the threshold for `precision`.

        `texts`: a text; a list, Series or array of texts; or a data frame, an Arrow table or a list of dictionaries,
        with the fields of DATA. `filter`: keys of labels to leave out, where a message counts keys that are not labels;
        or a list of keys of labels for each text. Raises InputError for other values, if there is no threshold for this
        precision, or if both limits are given.
        """
        k, lowest = whole_number("k", k, 1), self._exported.lowest_score(threshold, precision)
        texts = self._read(texts)
        left_out = _listed(filter, "filter")
        is_shared = all(isinstance(key, str) for key in left_out)
        if not is_shared and len(left_out) != len(texts):
            raise InputError(
                f"filter: expected keys of labels, or a list of keys for each of the {len(texts):,} texts, got "
                f"{len(left_out):,} items."
            )
        exported = leave_out(self._exported, self.labels, left_out, self._say) if is_shared else self._exported
        predictions = Predictions()
        for part, inputs, known in self._batches(texts):
            filters = None if is_shared else self._filters(left_out, len(predictions), len(predictions) + len(part))
            answer = exported.answer(inputs, k, filters, known)
            is_kept = answer.reaching(lowest)
            numbers = [column[is_kept] for column in (answer.scores, answer.probabilities) if column is not None]
            labels = iter(self.labels.scored(answer.ids[is_kept], *numbers))
            none = [None] * len(part) if answer.none_of_these is None else answer.none_of_these.tolist()
            facts = zip(part, is_kept.sum(axis=1).tolist(), known.tolist(), none, strict=True)
            for text, count, tokens, is_none in facts:
                predictions.append(Prediction(text, tuple(itertools.islice(labels, count)), tokens, is_none))
        return predictions

    def explain(self, text: str, label: int | str) -> Explanation:
        """Return the terms of a label's score for a text. `label`: id or key. Raises InputError for unknown labels."""
        label_id = self.labels.ids([label])[0] if isinstance(label, str) else whole_number("label", label)
        if label_id >= len(self.labels):
            raise InputError(f"label = {label}: expected a label id from 0 to below {len(self.labels):,}.")
        require_texts([text], "text")
        ((_, inputs, known),) = self._batches([text])
        serving = self._exported.serving
        if not known[0]:
            odds = float(self._exported.prior[1][label_id])
            return Explanation(odds, {"prior": odds})
        fused, scored = serving.fused, serving.parts(inputs, np.array([[label_id]]))
        terms = {"vector": scored.scores} if fused is None else fused.fusion.parts(scored, fused.frequency[scored.ids])
        parts = {name: float(term.item()) for name, term in terms.items()}
        explained = Explanation(sum(parts.values()), parts)
        if fused is not None and isinstance(fused.fusion, FusionWeights):
            weights, linear, memory = fused.fusion, fused.scorers.linear, fused.scorers.memory
            if linear is not None and inputs.tokens is not None:
                for ids, added in linear.explain(inputs.tokens.entries, label_id):
                    explained.words.append((self._tokenizer.words(ids), weights.linear * added))
            if memory is not None:
                cosines, points = memory.nearest(serving.embed(inputs))
                voting = memory.labels.take(points[0]).contains(np.full((points.size, 1), label_id))[:, 0]
                added = weights.votes * shares_of(cosines, points)[0, voting]
                keys = self._exported.point_keys(points[0, voting])
                explained.points.extend(zip(keys, cosines[0, voting].tolist(), added.tolist(), strict=True))
        return explained

    def embed(self, texts: Any) -> np.ndarray:
        """Embed texts for products with the labels' vectors: float32 [N, D], or [N, D + 1] with a last column of 1.

        `texts`: as for `predict`. Raises InputError for other things.
        """
        parts = [self._exported.serving.embed(inputs) for _, inputs, _ in self._batches(self._read(texts))]
        dimension = int(self._exported.table.parameters["dimension"])
        return np.concatenate(parts) if parts else np.zeros((0, dimension), np.float32)

    def _filters(self, lists: list[Any], start: int, stop: int) -> Ragged:
        """Return the ids of the labels to leave out for texts [start, stop). Raises InputError."""
        ids = [self.labels.ids(_listed(lists[n], f"filter[{n}]")) for n in range(start, stop)]
        return Ragged.from_counts(np.array([*itertools.chain(*ids)], np.int64), np.array([*map(len, ids)], np.int64))

    def _read(self, texts: Any) -> list[str]:
        """Return the texts in anything that `predict` accepts. Raises InputError."""
        listed = [texts] if isinstance(texts, str) else items_of(texts)
        if listed is None or any(isinstance(row, Mapping) for row in listed):
            from pipelines.formats.texts import Texts

            made_with, title_only = text_fields(self._exported)
            with input_url({"texts": texts if listed is None else listed}) as url:
                rows = Texts(url, title_only=title_only, made_with=made_with).batches(_BATCH, False)
                return [text for some in rows for text in some["text"].to_pylist()]
        require_texts(listed, "texts")
        return listed

    def _batches(self, listed: list[str]) -> Iterator[tuple[list[str], Inputs, np.ndarray]]:
        """Yield batches of texts, with the encoder's inputs and the number of known tokens. Raises InputError."""
        for start in range(0, len(listed), _BATCH):
            part = listed[start : start + _BATCH]
            dense = None if self._embed is None else pa.table({DENSE: self._embed(pa.array(part, pa.string()))})
            tokens, known = self._tokenizer.encode(part)
            yield part, Inputs(tokens, dense=dense and Inputs.of(dense).dense), known


def _listed(keys: Any, place: str) -> list[Any]:
    """Return the items of a list, a set or another iterable. Raises InputError."""
    listed = [*keys] if isinstance(keys, Set) else items_of(keys)
    if listed is None:
        raise InputError(f"{place}: expected a list of label keys, got {type(keys).__name__}: {keys!r:.80}.")
    return listed


def text_fields(exported: Exported) -> tuple[Fields, bool]:
    """Return the names of the fields that DATA was made with, and whether the texts of DATA are only titles."""
    made_with = exported.table.parameters["texts"]
    return parse_fields_by_table(made_with["fields"] or "")[0], made_with["text"] == "title"


def leave_out(exported: Exported, labels: Labels, keys: Sequence[str], say: Say) -> Exported:
    """Return the export without the labels `keys`; `say` gets a message that counts keys that are not labels."""
    ids = labels.known_ids(keys)
    if len(ids) < len(keys):
        say(f"filter: {len(keys) - len(ids):,} of {len(keys):,} keys are not labels of {exported.table.url}")
    return exported.without(ids)


def open_export(url: str, exact: bool = False, threads: int | None = None, device: str = "auto") -> Exported:
    """Open the export at `url` on `device`, with `threads` threads for searches.

    Raises InputError if the device does not exist, TableError, and StorageError.
    """
    exported = Exported.open(url, exact, find_device(device))
    use_threads(threads)
    return exported


def open_embedder(exported: Exported, place: str | None = None) -> Callable[[pa.Array], pa.Array] | None:
    """Open the text model whose dense vectors an export's encoder reads, by its recorded name or at `place`.

    The returned function computes a column of vectors from texts; None if the encoder reads no vectors. Raises
    InputError if the model is missing or different.
    """
    recorded = exported.dense_model if DENSE in exported.serving.columns else None
    if recorded is None:
        if place is not None:
            raise InputError(
                f"--embedder {place}: {exported.table.url} does not use a text model. Leave --embedder out."
            )
        return None
    from pipelines.models import dense_column
    from trainer.encoders.texts import TextFiles

    url, model = exported.table.url, replace(recorded, name=place or recorded.name)
    try:
        files = TextFiles.find(model.name)
    except InputError as error:
        raise InputError(f"{url}: the encoder reads the vectors of a text model: {error} {_EMBEDDER}") from None
    if files.digest != recorded.digest:
        raise InputError(
            f"{url}: the encoder reads the vectors of the model {recorded.name} (digest {recorded.digest[:12]}…), but "
            f"{model.name} is a different model (digest {files.digest[:12]}…). {_EMBEDDER}"
        )
    return functools.partial(dense_column, model.embedder("queries"), dimension=exported.table.parameters[DENSE])


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """The tokenizer of an export.

    `unknown` [n]: special and unknown tokens. `counts_words`: count words, not known tokens.
    """

    tokenizer: Tokenizer
    unknown: np.ndarray
    counts_words: bool
    url: str

    @classmethod
    def of(cls, exported: Exported) -> "TextTokenizer":
        """Open the tokenizer of an export whose encoder reads tokens."""
        place = exported.files.folder / ENCODER / FILE
        tokenizer = open_tokenizer(place.read_bytes(), str(place))
        added = tokenizer.get_added_tokens_decoder().items()
        unknown_token = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
        unknown = {number for number, token in added if token.special} | {unknown_token}
        counts_words = DENSE in exported.serving.columns
        return cls(tokenizer, np.array([*(unknown - {None})], np.int64), counts_words, exported.table.url)

    def encode(self, texts: Sequence[str]) -> tuple[Ragged, np.ndarray]:
        """Return the tokens of `texts` [B], and the numbers of known tokens (words if `counts_words`), int64 [B]."""
        values, offsets, _ = encode_texts(self.tokenizer, texts, f"of {self.url}")
        known = counts_of(offsets_of((values[:, None] != self.unknown).all(1))[offsets])
        return Ragged(values, offsets), np.array([len(text.split()) for text in texts]) if self.counts_words else known

    def words(self, ids: Sequence[int]) -> str:
        """Return the words for token ids."""
        return " ".join(str(self.tokenizer.id_to_token(token)) for token in ids)
