"""Answers for one row at a time by compiled loops, with the labels and scores of `Serving`."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from schemas import PAD
from schemas.ragged import Ragged, offsets_of, pad_columns
from scoring import row_kernels
from scoring.exported import Serving
from scoring.fusion import ADDED_LABELS, GAP, RANK, FusionTrees, PairScores, Reranker, Search, ShortlistScores
from scoring.memory import NEIGHBOURS, TEMPERATURE, shares_of
from scoring.names import IN_OTHERS
from scoring.neighbours import TEMPERATURE as TEMPERATURE_OF_WORDS
from scoring.scan import CodedBlock
from scoring.trees import finite
from scoring.words import RowFeatures
from trainer.inputs import Inputs

_COUNTS = np.arange(1 << 12, dtype=np.float32)
_DAMPED = (1 + np.log(np.maximum(_COUNTS, 1, dtype=np.float64))).astype(np.float32)
_NONE = np.empty(0, bool)
_TREES = 4  # trees whose masks are at most a long word
_NO_BOUNDS = np.empty(0, np.float32)
Found = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class RowServing(Serving):
    """Answers one row with tokens. `coded`: the ranges of vectors, if all are searched by their codes."""

    coded: tuple[CodedBlock, ...] = ()

    def _search(self, x: np.ndarray, exact: bool = False) -> Search:
        if not self.coded:
            return super()._search(x, exact)
        scans = [each.scan(x) for each in self.coded]

        def search(k: int, filters: Ragged, candidates: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
            left_out, struck = _NONE, filters.entries
            if candidates is not None or len(struck):
                left_out = np.zeros(len(self.vectors), bool)
                if candidates is not None and self.retired is not None:
                    left_out |= self.retired
                left_out[struck[(struck >= 0) & (struck < len(left_out))]] = True
            found = (scan.best(k, left_out[scan.block.start : scan.block.stop]) for scan in scans)
            ids, scores = best(k, *(np.concatenate(each, axis=1)[0] for each in reversed([*zip(*found, strict=True)])))
            return pad_columns(scores[None], k, -np.inf), pad_columns(ids[None], k, PAD)

        return search


@dataclass(frozen=True, eq=False)
class RowReranker(Reranker):
    """Reranks one row with tokens. `points`: of the memory, if they are searched by their codes."""

    points: CodedBlock | None = None

    def _fuse(
        self, x: Any, labels: PairScores, near: Found, listed: np.ndarray, inputs: Inputs | None
    ) -> tuple[ShortlistScores, np.ndarray]:
        assert inputs is not None, "a row has inputs"
        scored = self._score(x, inputs, labels, near, listed)
        frequency = self.frequency[scored.ids]
        if isinstance(self.fusion, FusionTrees):
            return scored, self._log_odds(self.fusion, scored, frequency)
        return scored, self.fusion.fuse(scored, frequency)

    def _score(self, x: Any, inputs: Inputs, labels: PairScores, near: Found, listed: np.ndarray) -> ShortlistScores:
        """Do the same as `Scorers.score`, with the labels in ascending order."""
        tokens, scorers, names = _tokens(inputs), self.scorers, self.scorers.names
        found, added, size = dict[str, Found](), [near[1][0]], len(self.frequency)
        if scorers.memory is not None:
            if self.points is None:
                nearest = scorers.memory.nearest(x)
            else:
                nearest = self.points.scan(scorers.memory.unit(x)).best(NEIGHBOURS, _NONE)
            found["points"] = _vote(*nearest, scorers.memory.labels, TEMPERATURE)
        if scorers.linear is not None:
            features, k = _weigh(scorers.linear.words, inputs), ADDED_LABELS["words"]
            ids, scores = best(k, *row_kernels.sum_lists(*features, *scorers.linear.weights, size, k, _NO_BOUNDS))
            order = np.argsort(ids)
            found["words"] = ids[order], scores[order]
        if scorers.neighbours is not None:
            texts, of_texts = scorers.neighbours.texts, scorers.neighbours.labels
            features = _weigh(scorers.neighbours.words, inputs)
            sums = row_kernels.sum_lists(*features, *texts, of_texts.rows, NEIGHBOURS, self._bounds)
            points, cosines = (pad_columns(each[None], NEIGHBOURS, PAD) for each in best(NEIGHBOURS, *sums))
            found["neighbours"] = _vote(cosines, points, of_texts, TEMPERATURE_OF_WORDS)
        added += [best(ADDED_LABELS[name], *votes)[0] for name, votes in found.items()]
        if names is not None:
            of_stems, k = (names.stems.codes, names.stems.lengths, names.stems.kinds, names.seen), ADDED_LABELS["name"]
            stems = row_kernels.find_stems(tokens, *of_stems)
            sums = row_kernels.sum_lists(stems, names.idf[stems], *names.weights, size, k, _NO_BOUNDS)
            added.append(best(k, *sums)[0])
        ids = near_ids = np.unique(np.concatenate(added))
        if listed is not near[1]:
            ids = np.unique(np.append(ids, listed[0]))
        ids = ids[int(ids[0] == PAD) :]
        by = {"vector": _products(labels, x, ids, near)}
        if scorers.texts is not None:
            by["text"] = labels.of(scorers.texts).score(x, ids[None])[0]
        by |= {name: row_kernels.look_up(ids, *votes) for name, votes in found.items()}
        if names is not None:
            of_names = ids, *names.of_labels, names.idf
            by["name"], by["name weight"], by["name stems"] = row_kernels.score_names(
                stems, np.ones(len(stems)), *of_names
            )
            if inputs.titles is not None:
                stems = row_kernels.find_stems(tokens[: inputs.titles[0]], *of_stems)
                by["name in title"] = row_kernels.score_names(stems, np.ones(len(stems)), *of_names)[0]
            for name in (name for name in IN_OTHERS if name in found):
                stems, values = row_kernels.list_stems(*found[name], *names.of_labels)
                by[f"name in {name}"] = row_kernels.score_names(stems, values, *of_names)[0] - by[name]
        is_near = np.ones(len(ids), bool) if listed is near[1] else np.isin(ids, near_ids)
        return ShortlistScores(ids[None], is_near[None], {name: each[None] for name, each in by.items()})

    @cached_property
    def _bounds(self) -> np.ndarray:
        """The largest weight of each word's texts; empty if a weight is negative."""
        assert self.scorers.neighbours is not None, "texts have words"
        texts = self.scorers.neighbours.texts
        bounds = np.zeros(texts.rows, np.float32)
        np.maximum.at(bounds, texts.row_of(), texts.values)
        return bounds if texts.values.min(initial=0) >= 0 else _NO_BOUNDS

    def _log_odds(self, fusion: FusionTrees, scored: ShortlistScores, frequency: np.ndarray) -> np.ndarray:
        """Do the same as `FusionTrees.fuse`."""
        scores = {"training points": frequency, **scored.by, "weights": fusion.weights.fuse(scored)}
        near, x = scored.near[0], np.full((len(fusion.trees.columns), scored.ids.shape[1]), np.nan)
        for place, column in enumerate(fusion.trees.columns):
            name = column.removesuffix(RANK).removesuffix(GAP)
            if name not in scores:
                continue
            x[place] = scores[name][0]
            if column.endswith(RANK):
                x[place] = row_kernels.rank(x[place], near)
            elif column.endswith(GAP):
                most = scores[name][0].max(where=near, initial=-np.inf)
                x[place] = scores[name][0] - (most if np.isfinite(most) else 0)
        *tables, left = self._tables
        space = np.empty_like(left)
        leaves = row_kernels.find_leaves(finite(x), *tables, space, space.view(np.uint64))
        return leaves.sum(axis=1)[None] + fusion.trees.bias  # type: ignore[no-any-return]

    @cached_property
    def _tables(self) -> tuple[np.ndarray, ...]:
        """Arguments of `find_leaves` for the trees; the last row of the masks has all leaves."""
        assert isinstance(self.fusion, FusionTrees), "only trees have leaves"
        thresholds, masks = zip(*self.fusion.trees.tables, strict=True)
        starts, joined = offsets_of(np.array([*map(len, thresholds)])), np.concatenate(masks)
        padded = np.full((len(joined) + 1, -(-joined.shape[1] // _TREES) * _TREES), ~joined.dtype.type(0))
        padded[:-1, : joined.shape[1]] = joined
        return np.concatenate(thresholds), starts, padded.view(np.uint64), *self.fusion.trees.leaves, padded[-1]


def best(k: int, ids: np.ndarray, scores: np.ndarray) -> Found:
    """Return the best `k` ids and their scores, best first; of equal scores, the smaller ids."""
    order = np.lexsort((ids, -scores))[:k]
    return ids[order], scores[order]


def _vote(cosines: np.ndarray, points: np.ndarray, labels: Ragged, temperature: float) -> Found:
    """Return the labels of `points` [1, K] with votes."""
    shares, listed = shares_of(cosines, points, temperature), points != PAD
    return row_kernels.sum_votes(points[listed], shares[listed], *labels)  # type: ignore[no-any-return]


def _products(labels: PairScores, x: np.ndarray, ids: np.ndarray, near: Found) -> np.ndarray:
    """Return the products of x with labels `ids`, ascending, of which a search has already scored those in `near`."""
    scored = near[1][0] != PAD
    places = np.searchsorted(ids, near[1][0][scored])
    others = np.ones(len(ids), bool)
    others[places] = False
    products = np.empty(len(ids), np.float32)
    products[places], products[others] = near[0][0][scored], labels.score(x, ids[None, others])[0]
    return products


def _tokens(inputs: Inputs) -> np.ndarray:
    assert inputs.tokens is not None, "a row has tokens"
    return inputs.tokens.entries.astype(np.int64)


def _weigh(words: RowFeatures, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Return the features of one row with their weights, as `RowFeatures` does."""
    ngrams, weight_of = (2, _COUNTS) if words.pairs else (1, _DAMPED)
    in_title, title = (0, 0.0) if inputs.titles is None else (int(inputs.titles[0]), float(words.title))
    arrays = weight_of, words.seen, words.factors
    return row_kernels.weigh_words(_tokens(inputs), in_title, ngrams, words.vocabulary, *arrays, title)


def compile_serving(serving: Serving) -> Serving | None:
    """Return what answers single rows of `serving`; None if rows have sparse features, which the loops do not read."""
    if "feature_ids" in serving.columns:
        return None
    fused, vectors = serving.fused, serving.vectors
    if fused is not None:
        memory = fused.scorers.memory
        points = None if memory is None else CodedBlock.of(memory.block)
        fused = RowReranker(fused.fusion, fused.scorers, fused.frequency, fused.shortlist, points=points)
    found = [CodedBlock.of(each.block) for each in (() if serving.index else vectors.indexed)]
    coded = tuple(each for each in found if each is not None)
    same = serving.inputs, vectors, serving.bias, serving.index, fused, serving.retired, serving.files
    return RowServing(serving.encoder, *same, coded=coded if len(coded) == len(found) else ())
