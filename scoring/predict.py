"""`load` a model, predict and explain."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.formats.base import Fields, parse_fields_by_table
from pipelines.formats.keyed import Texts
from pipelines.sharding.tokenizer import FILE, MAX_WORD, encode_texts, ends_at_spaces, open_tokenizer, special_tokens
from schemas import PAD
from schemas.arrow import DENSE
from schemas.errors import InputError, option, without_controls
from schemas.options import whole_number
from schemas.ragged import Ragged, counts_of, offsets_of, pad_columns
from schemas.waits import Say
from scoring.calibration import sigmoid
from scoring.containers import html_table, input_url, items_of, require_texts
from scoring.decision import BEST, Decision, read_decision
from scoring.export_versions import resolve_export
from scoring.exported import ENCODER, Exported
from scoring.memory import shares_of
from scoring.options import Source
from search.topk import configure_faiss, find_device
from trainer.inputs import Inputs
from trainer.modules import open_named
from trainer.threads import set_threads

_BATCH = 512  # texts per batch
_RANKED, _DEEPER, _DEEPEST = 64, 8, 1 << 16  # labels in which a rank is looked for: first, times so many, at most
_MOST_WORDS = 1 << 15  # words whose tokens are remembered


@dataclass(frozen=True)
class Label:
    """A label; a prediction has a `score` and, if the export is calibrated, the `probability` that it is correct."""

    key: str
    text: str
    score: float | None = None
    probability: float | None = None


@dataclass(frozen=True)
class Prediction:
    """The labels of a text, best first; out of the most frequent labels if `known_tokens` is 0.

    `none_of_these`: True if even the best label is probably incorrect; None if the export is not calibrated.
    `decision`: name of the decision about how many labels there are, and which.
    """

    text: str
    labels: tuple[Label, ...]
    known_tokens: int
    none_of_these: bool | None = None
    decision: str = ""


@dataclass(frozen=True)
class Explanation:
    """Terms that add up to a label's score: `parts` by source, with details in `words` and `points`.

    "vector": the label's vector; "text": the embedding of the label's text; "points": votes of nearby training points;
    "words": the linear ranker; "tree": NGAME's tree; "prior": for a text without known tokens. Boosted trees have more:
    "neighbours": nearest texts by words; "name", "name in …": the label's name; "training points": their number;
    "weights": the sum by weights; "bias". Each also has what its rank and its gap to the best score add.
    `words`: (a word or two neighbouring words, contribution to the score); `points`: (key, cosine, contribution).

    `rank`: place among all labels, 1 for the best; None: not among the best 65,536, or retired. `is_given`: whether the
    decision gives the label, with the `reason`. `distance`: its score less the lowest one that is given; None if the
    decision has no such score. If it is not given, `gaps`: its parts less those of the label `against`, lowest first;
    this is the last label that is given, or else the best one.
    """

    score: float
    parts: dict[str, float]
    words: list[tuple[str, float]] = field(default_factory=list)
    points: list[tuple[str, float, float]] = field(default_factory=list)
    rank: int | None = None
    is_given: bool = True
    reason: str = ""
    distance: float | None = None
    against: str | None = None
    gaps: dict[str, float] = field(default_factory=dict)


class Predictions(list[Prediction]):
    """One prediction per text, in the order of the texts; shown as a table in a notebook."""

    def __repr__(self) -> str:
        blocks = []
        for prediction in self:
            lines = [f"  {label.score:9.4f}  {label.key}  {label.text}" for label in prediction.labels]
            blocks.append("\n".join([" ".join(prediction.text.split()), *lines]))
        return without_controls("\n".join(blocks))

    def _repr_html_(self) -> str:
        pairs = ((prediction.text, label) for prediction in self for label in prediction.labels)
        rows = [[text, label.key, label.text, f"{label.score:.4f}"] for text, label in pairs]
        return html_table(["text", "key", "label", "score"], rows)


class Labels(Sequence[Label]):
    """All labels of a model, indexed by label id."""

    def __init__(self, exported: Exported) -> None:
        self._exported, table = exported, exported.label_table(("key", "text"))
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
        return self._exported.ids_of(keys)

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
        self._tokenizer = TextTokenizer(exported)

    def __repr__(self) -> str:
        dimension, step = (self._exported.table.parameters[name] for name in ("dimension", "step"))
        return f"{self._exported.table.url}: {len(self.labels):,} labels, {dimension} dimensions, step {step:,}"

    def compile(self) -> bool:
        """Let compiled loops answer single texts, with equal labels and scores; return whether they do from now on.

        Compiling takes some 15 seconds once per machine, then a second; calls of `predict` may go on meanwhile. Returns
        False without Numba, and if the encoder reads sparse features.
        """
        if find_spec("numba") is None:
            return False
        from scoring.compiled import compile_serving  # loading Numba takes a third of a second

        serving = self._exported.serving
        if serving.alone is None and (alone := compile_serving(serving)) is not None:
            compiled = replace(self._exported, serving=replace(serving, alone=alone))
            for _, inputs, known in self._batches(["a text\nwith a title"]):
                compiled.decide(inputs, BEST, known=known)
            self._exported = compiled
        return self._exported.serving.alone is not None

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
        return Labels(self._exported)

    def decide(self, decision: Source = None, **stated: Any) -> Decision:
        """Return the decision of the export, changed by `decision`, and by what is `stated` as for `predict`.

        Raises InputError, StorageError.
        """
        return self._exported.decision.narrowed(read_decision(decision, **stated))

    def predict(
        self,
        texts: Any,
        decision: Source = None,
        *,
        max_labels: int | None = None,
        min_probability: float | None = None,
        precision: float | None = None,
        at_least: int | None = None,
        allowed: Iterable[str] | Iterable[Iterable[str]] | None = None,
        never: Iterable[str] | Iterable[Iterable[str]] = (),
        groups: Iterable[Iterable[str]] = (),
    ) -> Predictions:
        """Return the labels that the export's decision gives to each text, changed by what is stated here.

        `texts`: a text; a list, Series or array of texts; or a data frame, an Arrow table or a list of dictionaries,
        with the fields of DATA. `decision`: a `Decision`, a mapping of its keys, or a TOML file. `max_labels`,
        `min_probability`, `precision` and `at_least`: how many labels; if any is stated, all four of the export are
        replaced. `allowed`, `never`: keys of labels, or a list of keys for each text. `groups`: lists of keys, of which
        at most one is given. Raises InputError for other values, for unknown keys, and for a limit that the export has
        no calibration for or does not meet.
        """
        texts = self._read(texts)
        given: dict[str, Any] = {"groups": [_listed(group, "groups") for group in _listed(groups, "groups")]}
        given |= {"precision": precision, "min_probability": min_probability}
        for name, number, least in (("max_labels", max_labels, 1), ("at_least", at_least, 0)):
            given[name] = None if number is None else whole_number(name, number, least)
        of_rows: dict[str, Sequence[Any]] = {}
        for name, keys in (("allowed", allowed), ("never", never)):
            listed = [] if keys is None else _listed(keys, name)
            if keys is None or all(isinstance(key, str) for key in listed):
                given[name] = None if keys is None else listed
                continue
            if len(listed) != len(texts):
                raise InputError(
                    f"{name}: expected keys of labels, or a list of keys for each of the {len(texts):,} texts, got "
                    f"{len(listed):,} items."
                )
            of_rows[name] = listed
        chosen, predictions = self.decide(decision, **given), Predictions()
        for part, inputs, known in self._batches(texts):
            places = range(len(predictions), len(predictions) + len(part))
            own = {name: self._ids(name, listed, places) for name, listed in of_rows.items()}
            answer = self._exported.decide(inputs, chosen, known=known, **own)
            is_given = answer.ids != PAD
            columns = [column[is_given] for column in (answer.scores, answer.probabilities) if column is not None]
            labels = iter(self.labels.scored(answer.ids[is_given], *columns))
            none = [None] * len(part) if answer.none_of_these is None else answer.none_of_these.tolist()
            facts = zip(part, is_given.sum(axis=1).tolist(), known.tolist(), none, strict=True)
            for text, count, tokens, is_none in facts:
                found = tuple(itertools.islice(labels, count))
                predictions.append(Prediction(text, found, tokens, is_none, chosen.name))
        return predictions

    def _ids(self, name: str, keys: Sequence[Any], places: Iterable[int]) -> Ragged:
        """Return the ids of the keys that `name` has for the texts at `places`. Raises InputError."""
        return Ragged.from_lists([self._exported.ids_of(_listed(keys[n], f"{name}[{n}]"), name) for n in places])

    def rank(self, texts: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids int64 [N, K] of the best labels of each text, padded with -1, and their probabilities float32.

        K: `k`, or the number of labels. Without a calibration, the probabilities are the sigmoids of the scores.
        """
        k = min(k, len(self.labels))
        ids, found = [np.zeros((0, k), np.int64)], [np.zeros((0, k), np.float32)]
        for _, inputs, known in self._batches(self._read(texts)):
            answer = self._exported.decide(inputs, Decision(max_labels=k), known=known)
            probabilities = sigmoid(answer.scores) if answer.probabilities is None else answer.probabilities
            ids.append(pad_columns(answer.ids, k, PAD))
            found.append(pad_columns(probabilities, k, 0))
        return np.concatenate(ids), np.concatenate(found)

    def explain(self, text: str, label: int | str, decision: Source = None, **stated: Any) -> Explanation:
        """Return the terms of a label's score for a text, and why the label is given or not.

        `label`: id or key. `decision` and `stated`: as for `predict`. Raises InputError for unknown labels.
        """
        label_id = self.labels.ids([label])[0] if isinstance(label, str) else whole_number("label", label)
        if label_id >= len(self.labels):
            raise InputError(f"label = {label}: expected a label id from 0 to below {len(self.labels):,}.")
        require_texts([text], "text")
        chosen, serving = self.decide(decision, **stated), self._exported.serving
        ((_, inputs, known),) = self._batches([text])
        parts, scores = self._parts(inputs, known, label_id)
        why = self._why(inputs, known, label_id, parts, chosen)
        explained = Explanation(sum(parts.values()), parts, **why)
        if serving.fused is None or not known[0]:
            return explained
        linear, memory = serving.fused.scorers.linear, serving.fused.scorers.memory
        if linear is not None and inputs.tokens is not None and scores["words"]:
            share = parts["words"] / scores["words"]
            for ids, added in linear.explain(inputs, label_id):
                explained.words.append((self._tokenizer.words(ids), share * added))
        if memory is not None and scores["points"]:
            cosines, points = memory.nearest(serving.embed(inputs))
            voting = memory.labels.take(points[0]).contains(np.full((points.size, 1), label_id))[:, 0]
            added = parts["points"] / scores["points"] * shares_of(cosines, points)[0, voting]
            keys = self._exported.point_keys(points[0, voting])
            explained.points.extend(zip(keys, cosines[0, voting].tolist(), added.tolist(), strict=True))
        return explained

    def _parts(self, inputs: Inputs, known: np.ndarray, label: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return the terms of a label's score for one text, and all scorers' scores, both by name."""
        if not known[0]:
            parts = {"prior": float(self._exported.prior[1][label])}
            return parts, parts
        return self._exported.serving.explain(inputs, label)

    def _why(
        self, inputs: Inputs, known: np.ndarray, label: int, parts: Mapping[str, float], decision: Decision
    ) -> dict[str, Any]:
        """Return the fields of an `Explanation` about the rank and the decision."""
        exported, score, width = self._exported, sum(parts.values()), _RANKED
        answer, rule = exported.decide(inputs, decision, known=known), exported.look_up(decision)
        while True:
            top = exported.decide(inputs, Decision(max_labels=width), known=known).ids
            if label in top[0] or width >= min(exported.table.rows, _DEEPEST):
                break
            width *= _DEEPER
        rank = int(np.argmax(top[0] == label)) + 1 if label in top[0] else None
        given = answer.ids[0][answer.ids[0] != PAD].tolist()
        curve, limit = exported.calibration, None
        if curve is not None and decision.limit is not None:
            share = getattr(decision, decision.limit)
            limit = curve.precision.score_of(share) if decision.precision else curve.score_of(share)
            if limit is not None and not known[0]:  # its scores are log odds
                probability = curve(np.array(limit)) if decision.precision else np.array(share)
                limit = float(np.log(probability) - np.log1p(-probability))
        if label in given:
            distance = None if limit is None else score - limit
            return {"rank": rank, "reason": f"given, by {decision.name}", "distance": distance}
        is_below = limit is not None and (score < limit or not given)
        lowest = limit if is_below or not given else float(answer.scores[0, len(given) - 1])
        distance = None if lowest is None else score - lowest
        others = given[-1:] or [each for each in top[0].tolist() if each not in (label, PAD)][:1]
        key, gaps = None, dict[str, float]()
        for other in others:
            key, compared = self.labels[other].key, self._parts(inputs, known, other)[0]
            gaps = {name: parts.get(name, 0.0) - compared.get(name, 0.0) for name in {**compared, **parts}}
        may_give = np.ones(exported.table.rows, bool) if rule.may_give is None else rule.may_give
        stays = top[:, may_give[top[0]] & (top[0] != PAD)]
        struck = rule.groups is not None and (rule.groups.strike(stays)[0] & (stays[0] == label)).any()
        if exported.serving.retired is not None and exported.serving.retired[label]:
            reason = "the label is retired"
        elif not may_give[label]:
            reason = f"the decision does not allow it: {decision.name}"
        elif struck:
            reason = f"a better label of its group is there: {decision.name}"
        elif answer.unfamiliar[0] and decision.limit is not None:
            reason = "the text is unlike the texts that the limit was learned on"
        else:
            of = f"the limit, {decision.name}" if is_below else f"{key}, the last label that is given"
            reason = f"its score is {-(distance or 0):.3f} below that of {of}"
        gaps = {name: gap for name, gap in sorted(gaps.items(), key=lambda gap: gap[1]) if gap}
        found = {"rank": rank, "is_given": False, "reason": reason, "distance": distance}
        return {**found, "against": key, "gaps": gaps}

    def embed(self, texts: Any) -> np.ndarray:
        """Embed texts for products with the labels' vectors: float32 [N, D], or [N, D + 1] with a last column of 1.

        `texts`: as for `predict`. Raises InputError for other things.
        """
        parts = [self._exported.serving.embed(inputs) for _, inputs, _ in self._batches(self._read(texts))]
        dimension = int(self._exported.table.parameters["dimension"])
        return np.concatenate([np.zeros((0, dimension), np.float32), *parts])

    def _read(self, texts: Any) -> list[str]:
        """Return the texts in anything that `predict` accepts. Raises InputError."""
        listed = [texts] if isinstance(texts, str) else items_of(texts)
        if listed is None or any(isinstance(row, Mapping) for row in listed):
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
            inputs, known = self._tokenizer.encode(part)
            yield part, inputs if dense is None else replace(inputs, dense=Inputs.of(dense).dense), known


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


def open_export(
    url: str, exact: bool = False, threads: int | None = None, device: str = "auto", allow: Sequence[str] = ()
) -> Exported:
    """Open the export at `url` on `device`, with `threads` threads; None: all cores, but one thread in a forked child.

    `allow`: "module:name" of scores from outside that the export may have. Raises InputError if the device or a module
    does not exist, TableError, and StorageError.
    """
    for name in [allow] if isinstance(allow, str) else allow:
        open_named(name, where=option("allow", name))
    exported = Exported.open(url, exact, find_device(device))
    if threads:
        set_threads(threads)
    configure_faiss(threads)
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
                f"{option('embedder', place)}: {exported.table.url} does not use a text model. Leave the option out."
            )
        return None
    from pipelines.models import dense_column
    from trainer.encoders.texts import TextFiles

    remedy = f"Give a path or hub name of the same model with {option('embedder', 'MODEL')}."
    url, model = exported.table.url, replace(recorded, name=place or recorded.name)
    try:
        files = TextFiles.find(model.name)
    except InputError as error:
        raise InputError(f"{url}: the encoder reads the vectors of a text model: {error} {remedy}") from None
    if files.digest != recorded.digest:
        raise InputError(
            f"{url}: the encoder reads the vectors of the model {recorded.name} (digest {recorded.digest[:12]}…), but "
            f"{model.name} is a different model (digest {files.digest[:12]}…). {remedy}"
        )
    return functools.partial(dense_column, model.embedder("queries"), dimension=exported.table.parameters[DENSE])


class TextTokenizer:
    """The tokenizer of an export whose encoder reads tokens, or dense vectors of texts."""

    def __init__(self, exported: Exported) -> None:
        place = exported.files.folder / ENCODER / FILE
        self._tokenizer, self._url = open_tokenizer(place.read_bytes(), str(place)), exported.table.url
        special = {n for n, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        unknown = self._tokenizer.token_to_id(getattr(self._tokenizer.model, "unk_token", None) or "")
        self._unknown = np.array([*((special | {unknown}) - {None})], np.int64)
        self._counts_words = DENSE in exported.serving.columns
        self._around = special_tokens(self._tokenizer) if ends_at_spaces(self._tokenizer) else None
        self._words: dict[str, list[int]] = {}  # tokens of words in earlier texts, if texts can be split at spaces

    def encode(self, texts: Sequence[str]) -> tuple[Inputs, np.ndarray]:
        """Return the tokens and titles of `texts` [B], and the numbers of known tokens (or words for dense vectors)."""
        if len(texts) == 1 and self._around is not None and max(map(len, texts[0].split(" "))) <= MAX_WORD:
            values, offsets, titles = self._encode_words(texts[0], *self._around)
        else:
            values, offsets, _, titles = encode_texts(self._tokenizer, texts, f"of {self._url}")
        inputs = Inputs(Ragged(values, offsets), titles=titles)
        if self._counts_words:
            return inputs, np.array([len(text.split()) for text in texts])
        return inputs, counts_of(offsets_of((values[:, None] != self._unknown).all(1))[offsets])

    def _encode_words(self, text: str, before: list[int], after: list[int]) -> tuple[np.ndarray, ...]:
        """Return the tokens of one text, its offsets, and the tokens of its title, from the tokens of its words."""
        title, *more = text.split("\n", 1)
        parts = text.replace("\n", " ").split(" ")
        known = self._words if len(self._words) < _MOST_WORDS else {}
        if new := [*({*parts} - known.keys())]:
            values, offsets, *_ = encode_texts(self._tokenizer, new, f"of {self._url}", special=False)
            bounds = itertools.pairwise(offsets.tolist())
            known |= zip(new, (values[start:stop].tolist() for start, stop in bounds), strict=True)
        self._words, cut = known, self._tokenizer.truncation
        limit = None if cut is None else cut["max_length"] - len(before) - len(after)
        tokens = [*itertools.chain.from_iterable(known[word] for word in parts)][:limit]
        listed = [*before, *tokens, *after]
        of_title = sum(len(known[word]) for word in title.split(" "))
        count = len(before) + min(of_title, len(tokens)) if more else len(listed)
        return np.array(listed, np.uint32), np.array([0, len(listed)]), np.array([count], np.int32)

    def words(self, ids: Sequence[int]) -> str:
        return " ".join(str(self._tokenizer.id_to_token(token)) for token in ids)
