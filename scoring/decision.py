"""One decision, the same for Python, the command line, HTTP and exports: how many labels of a ranking are given, which.

`choose` is the whole rule, on arrays. A ranking is best first, so what it needs is always a prefix of the ranking.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from typing import Any, NamedTuple

import numpy as np
from pydantic import model_validator

from schemas import PAD, storage
from schemas.errors import InputError, option
from schemas.layout import DataLayout
from schemas.options import check
from schemas.table import Table
from scoring.calibration import Calibration
from scoring.options import DecisionLimits, DecisionOptions, Source

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LIMITS = {"precision": "precision", "min_probability": "probability"}  # options, and words of a name
NUMBERS = (*LIMITS, "max_labels", "at_least")


def _describe(decision: "Decision") -> str:
    """Return the name of a decision that has none: what it states."""
    parts = [f"{word} {getattr(decision, name):g}" for name, word in LIMITS.items() if name == decision.limit]
    if decision.max_labels is not None:
        parts.append(f"{'at most' if parts else 'best'} {decision.max_labels} labels")
    if decision.at_least:
        parts.append(f"at least {decision.at_least}")
    if decision.allowed is not None:
        parts.append(f"of {len(decision.allowed):,} allowed labels")
    for words, keys in (("never given", decision.never), ("groups", decision.groups)):
        parts += [f"{words}: {len(keys):,}"] if keys else []
    return ", ".join(parts) or "as in the export"


class Decision(DecisionLimits):
    """How many labels of a text are given, and which. See docs/export.md for the rule.

    `groups`: keys of labels of which at most one is given, the best. `name`: shown with answers.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    name: str = ""

    @model_validator(mode="after")
    def _agree(self) -> "Decision":
        """Refuse what contradicts itself, and name a decision without a name by what it states."""
        if self.precision is not None and self.min_probability is not None:
            raise ValueError(f"{option('precision')} and {option('min_probability')}: give only one of the two")
        if self.max_labels is not None and self.at_least > self.max_labels:
            raise ValueError(
                f"{option('at_least', self.at_least)} is more than {option('max_labels', self.max_labels)}: "
                "give a smaller number"
            )
        for group in self.groups:
            if len(group) < 2 or len({*group}) < len(group):
                raise ValueError(f"groups: expected two or more different keys of labels, got {[*group]!r:.200}")
        if not self.name:
            object.__setattr__(self, "name", _describe(self))
        return self

    @property
    def limit(self) -> str | None:
        """Name of what limits the scores of labels; None: no limit."""
        return next((name for name in LIMITS if getattr(self, name) is not None), None)

    def require(self, calibration: Calibration | None) -> Calibration:
        """Return the calibration that the limit needs. Raises InputError if there is none, or if it never meets it."""
        if calibration is None:
            raise InputError(
                f"{option(str(self.limit))} needs probabilities, but there is no calibration. Export with held-out "
                f"rows (`extremis shard --validation 0.05`, or {option('set', {'data.holdout': 0.02})} in training)."
            )
        highest = float(calibration.probabilities[-1])
        if self.min_probability is not None and self.min_probability > highest:
            raise InputError(
                f"{option('min_probability', self.min_probability)}: no label of a text has a probability above "
                f"{highest:.3f} in this model. Give a lower one."
            )
        if self.precision is not None:
            calibration.precision.score_of(self.precision)
        return calibration

    def narrowed(self, by: "Decision") -> "Decision":
        """Return what a call decides, `by`: its numbers, if it states any, and only labels that both may give.

        Raises InputError if the two allow no label in common, or contradict each other.
        """
        numbers = by if by.model_dump(include={*NUMBERS}, exclude_defaults=True) else self
        facts: dict[str, Any] = {name: getattr(numbers, name) for name in NUMBERS}
        allowed = [keys for keys in (self.allowed, by.allowed) if keys is not None]
        if len(allowed) == 2:
            common = {*allowed[1]}
            allowed = [tuple(key for key in allowed[0] if key in common)]
            if not allowed[0]:
                raise InputError(
                    f"{option('allowed')}: none of these labels is allowed by the decision {self.name!r} of the "
                    "export. Name others, or export again with another decision."
                )
        facts["allowed"] = allowed[0] if allowed else None
        facts["never"] = tuple(dict.fromkeys((*self.never, *by.never)))
        facts["groups"] = tuple(dict.fromkeys((*self.groups, *by.groups)))
        if "name" in by.model_fields_set:
            facts["name"] = by.name
        elif all(getattr(self, name) == fact for name, fact in facts.items()):
            return self
        return check(Decision, facts)

    def to_toml(self) -> bytes:
        import tomli_w

        return tomli_w.dumps(self.model_dump(exclude_none=True, mode="json")).encode()


BEST = Decision(max_labels=5)  # where nothing at all is stated


def read_decision(source: Source, **stated: Any) -> Decision:
    """Return the decision `source`, which may be a mapping or a TOML file, narrowed by what is `stated` besides.

    Raises InputError, StorageError.
    """
    if isinstance(source, str | PathLike):
        place = fspath(source)
        try:
            source = parse_decision(storage.read_bytes(place), place)
        except (FileNotFoundError, IsADirectoryError):
            raise InputError(
                f"{option('decision', place)}: no such file. Give a TOML file, as docs/export.md shows."
            ) from None
    if source is None or isinstance(source, Mapping):
        source = check(Decision, source or {})
    if not isinstance(source, Decision):
        raise InputError(
            parameter="decision", got=f"{source!r:.80}", expected="a Decision, a mapping, or the path of a TOML file"
        )
    return source.narrowed(check(Decision, {name: value for name, value in stated.items() if value is not None}))


def decision_of(options: DecisionOptions) -> Decision:
    """Return the decision that options of a command state, as `read_decision` does."""
    return read_decision(options.decision, **{name: getattr(options, name) for name in DecisionLimits.model_fields})


def parse_decision(content: bytes, place: str) -> Decision:
    """Parse a decision.toml at `place`. Raises InputError."""
    try:
        return check(Decision, tomllib.loads(content.decode()))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not TOML: {error}. Fix the file.") from None
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


class Groups(NamedTuple):
    """Groups of labels: `labels` int64 [n] ascending, and `of` int64 [n, W], their groups, padded with `total`."""

    labels: np.ndarray
    of: np.ndarray
    total: int

    @classmethod
    def of_ids(cls, groups: Sequence[Sequence[int]]) -> "Groups":
        found: dict[int, list[int]] = {}
        for number, ids in enumerate(groups):
            for label in ids:
                found.setdefault(label, []).append(number)
        of = np.full((len(found), max(map(len, found.values()), default=0)), len(groups))
        for row, label in enumerate(sorted(found)):
            of[row, : len(found[label])] = found[label]
        return cls(np.array(sorted(found), np.int64), of, len(groups))

    def strike(self, top: np.ndarray) -> np.ndarray:
        """Return which labels of the rankings `top` [B, K] share a group with a better one that stays, bool [B, K]."""
        struck, taken = np.zeros(top.shape, bool), np.zeros((len(top), self.total + 1), bool)
        places = np.minimum(np.searchsorted(self.labels, top), len(self.labels) - 1)
        is_grouped = self.labels[places] == top
        for column in np.flatnonzero(is_grouped.any(axis=0)):
            rows = np.flatnonzero(is_grouped[:, column])
            of = self.of[places[rows, column]]
            is_taken = taken[rows[:, None], of].any(axis=1)
            struck[rows[is_taken], column] = True
            taken[rows[~is_taken, None], of[~is_taken]] = True
            taken[:, -1] = False  # padding
        return struck


class Chosen(NamedTuple):
    """Which labels of rankings are given, bool [B, K], and of which a longer one would give the same, bool [B]."""

    given: np.ndarray
    certain: np.ndarray


def choose(top: np.ndarray, reached: np.ndarray, decision: Decision, groups: Groups | None = None) -> Chosen:
    """Choose from rankings: `top` int64 [B, K] label ids that may be given, best first, padded with -1.

    `reached` [B, K] bool, of each row a prefix: which labels are at or above the limit, as by `reached`.
    """
    stays = top != PAD
    if groups is not None:
        stays &= ~groups.strike(top)
    place, most = np.cumsum(stays, axis=1), np.inf if decision.max_labels is None else decision.max_labels
    given = stays & (reached | (place <= decision.at_least)) & (place <= most)
    last = place[:, -1]
    is_below = ~reached[:, -1] & (last >= decision.at_least)
    return Chosen(given, (last >= most) | is_below | (top[:, -1] == PAD))


def reached(
    decision: Decision, calibration: Calibration | None, scores: np.ndarray, probabilities: np.ndarray | None = None
) -> np.ndarray:
    """Return which `scores` [B, K], with `probabilities` or those of the curve, are at or above the limit, bool [B, K].

    Raises InputError for a limit that the calibration does not have or meet.
    """
    if decision.limit is None:
        return np.full(scores.shape, decision.max_labels is not None or not decision.at_least)
    curve = decision.require(calibration)
    if decision.precision is not None:
        return scores >= np.float32(curve.precision.score_of(decision.precision))
    return (curve(scores) if probabilities is None else probabilities) >= decision.min_probability


@dataclass(frozen=True, eq=False)
class LabelIds:
    """Finds ids of the labels at `url`; `read` returns the keys of all labels by id, and is called once they matter."""

    url: str
    read: Callable[[], Sequence[str]]

    @classmethod
    def of_data(cls, data: DataLayout) -> "LabelIds":
        return cls(data.root, lambda: Table.open(data.labels, "labels").read(("key",))["key"].to_pylist())

    @cached_property
    def by_key(self) -> Mapping[str, int]:
        return {key: number for number, key in enumerate(self.read())}

    def __call__(self, keys: Sequence[str], name: str = "") -> list[int]:
        """Return the ids of `keys`, which the option `name` has. Raises InputError for a key that is no label."""
        try:
            return [self.by_key[key] for key in keys]
        except (KeyError, TypeError):
            first, *more = (key for key in keys if not isinstance(key, str) or key not in self.by_key)
            others = f" and {len(more):,} others of {len(keys):,}" if more else ""
            where = f"{option(name)}: " if name else ""
            raise InputError(f"{where}unknown label key {first!r:.80}{others}: {self.url} has no such label.") from None


@dataclass(frozen=True, eq=False)
class Rule:
    """A decision about the labels of a model: `may_give` bool [L], None if all may be given, and the `groups` by id."""

    decision: Decision
    may_give: np.ndarray | None = None
    groups: Groups | None = None

    @classmethod
    def of(cls, decision: Decision, ids: LabelIds) -> "Rule":
        """Look up the keys that a decision states. Raises InputError for a key that is no label."""
        may_give = None
        if decision.allowed is not None or decision.never:
            may_give = np.full(len(ids.by_key), decision.allowed is None)
            may_give[ids(decision.allowed or (), "allowed")] = True
            may_give[ids(decision.never, "never")] = False
        groups = [ids(group, "groups") for group in decision.groups]
        return cls(decision, may_give, Groups.of_ids(groups) if groups else None)
