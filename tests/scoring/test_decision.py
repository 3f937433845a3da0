"""A decision: its rule in plain words against arrays, what a call changes, files, and what is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import PAD
from schemas.errors import InputError
from scoring.decision import BEST, Decision, Groups, choose, read_decision

LABELS = 12
KEYS = [f"l{label}" for label in range(LABELS)]


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    at_least = draw(st.integers(0, 4))
    most = draw(st.none() | st.integers(max(1, at_least), 8))
    some = st.lists(st.sampled_from(KEYS), unique=True, max_size=6).map(tuple)
    groups = st.lists(st.lists(st.sampled_from(KEYS), unique=True, min_size=2, max_size=4).map(tuple), max_size=3)
    return Decision(
        max_labels=most,
        at_least=at_least,
        min_probability=draw(st.none() | st.just(0.5)),
        allowed=draw(st.none() | some.filter(bool)),
        never=draw(some),
        groups=tuple(draw(groups)),
    )


def plainly(decision: Decision, ranking: list[tuple[str, float]], limit: float | None) -> list[str]:
    """The rule as docs/export.md states it, of a ranking of all labels with their probabilities, best first."""
    given: list[str] = []
    stays: list[str] = []
    for key, probability in ranking:
        if key in decision.never or (decision.allowed is not None and key not in decision.allowed):
            continue
        if any(key in group and {*group} & {*stays} for group in decision.groups):
            continue
        stays.append(key)
        no_limit = decision.max_labels is not None or not decision.at_least
        is_above = no_limit if limit is None else probability >= limit
        if is_above or len(stays) <= decision.at_least:
            given.append(key)
    return given[: decision.max_labels]


@settings(deadline=None)
@given(decision=decisions(), data=st.data())
def test_a_choice_is_the_rule_and_is_certain_only_where_more_labels_change_nothing(
    decision: Decision, data: st.DataObject
) -> None:
    orders = data.draw(st.lists(st.permutations(range(LABELS)), min_size=1, max_size=4))
    found = [sorted(data.draw(st.lists(st.floats(0, 1), min_size=LABELS, max_size=LABELS)))[::-1] for _ in orders]
    top, probabilities = np.array(orders), np.array(found)
    may_give = [key not in decision.never and key in (decision.allowed or KEYS) for key in KEYS]
    left = [[label for label in order if may_give[label]] for order in orders]
    top = np.array([row + [PAD] * (LABELS - len(row)) for row in left])
    pairs = [[*zip(order, row, strict=True)] for order, row in zip(orders, found, strict=True)]
    shares = [[p for label, p in row if may_give[label]] for row in pairs]
    probabilities = np.array([row + [0.0] * (LABELS - len(row)) for row in shares])
    listed = [[KEYS.index(key) for key in group] for group in decision.groups]
    groups = Groups.of_ids(listed) if listed else None
    reached = probabilities >= 0.5
    if decision.min_probability is None:
        reached = np.full(top.shape, decision.max_labels is not None or not decision.at_least)
    whole = choose(top, reached, decision, groups)
    for row, own in enumerate(pairs):
        ranking = [(KEYS[label], p) for label, p in own]
        assert [KEYS[label] for label in top[row][whole.given[row]]] == plainly(
            decision, ranking, decision.min_probability
        )
    for depth in range(1, LABELS):
        part = choose(top[:, :depth], reached[:, :depth], decision, groups)
        for row in np.flatnonzero(part.certain).tolist():
            assert part.given[row].sum() == whole.given[row].sum()


def test_a_call_replaces_numbers_and_narrows_labels() -> None:
    stored = Decision(
        precision=0.8, at_least=1, never=("a",), allowed=("a", "b", "c"), groups=(("b", "c"),), name="shop"
    )
    assert stored.narrowed(Decision()) is stored
    assert stored.narrowed(read_decision(None, max_labels=3)).model_dump() == {
        **stored.model_dump(),
        "precision": None,
        "at_least": 0,
        "max_labels": 3,
        "name": "best 3 labels, of 3 allowed labels, never given: 1, groups: 1",
    }
    by = read_decision({"never": ["b"], "allowed": ["c", "d", "b"], "groups": [["b", "c"], ["a", "d"]], "name": "mine"})
    both = stored.narrowed(by)
    assert (both.precision, both.at_least, both.name) == (0.8, 1, "mine")
    assert (both.never, both.allowed) == (("a", "b"), ("b", "c"))
    assert both.groups == (("b", "c"), ("a", "d"))
    with pytest.raises(InputError, match="none of these labels is allowed by the decision 'shop' of the export"):
        stored.narrowed(Decision(allowed=("d",)))
    assert BEST.narrowed(Decision()).name == "best 5 labels"
    assert BEST.narrowed(Decision(min_probability=0.5, at_least=1, max_labels=9)).name == (
        "probability 0.5, at most 9 labels, at least 1"
    )


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"precision": 0.5, "min_probability": 0.5}, "give only one of the two"),
        ({"max_labels": 1, "at_least": 2}, "at_least=2 is more than max_labels=1"),
        ({"max_labels": 0}, "max_labels: expected a number greater than or equal to 1, got 0"),
        ({"precision": 0}, "precision: expected a number greater than 0, got 0"),
        ({"groups": [["a"]]}, "groups: expected two or more different keys"),
        ({"groups": [["a", "a"]]}, "groups: expected two or more different keys"),
        ({"k": 3}, "k: expected no such option"),
        ({"never": "@nowhere"}, "never: expected @ and a file of keys of labels"),
    ],
)
def test_what_is_no_decision(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_decision(stated)


def test_a_decision_in_a_file(tmp_path: Any) -> None:
    place = tmp_path / "decision.toml"
    stored = Decision(min_probability=0.5, never=("a", "b, c"), groups=(("d", "e"),), name="shop")
    place.write_bytes(stored.to_toml())
    assert read_decision(place) == read_decision(str(place)) == stored
    (tmp_path / "keys").write_text("a\nb, c\n")
    assert read_decision(None, never=f"@{tmp_path / 'keys'}").never == ("a", "b, c")
    for content, message in (("precision = ", "not TOML"), ("precison = 1", "precison: expected no such option")):
        place.write_text(content)
        with pytest.raises(InputError, match=f"decision.toml: .*{message}"):
            read_decision(place)
    for wrong, message in (
        (tmp_path / "none.toml", "no such file"),
        (5, "expected a Decision, a mapping, or the path"),
    ):
        with pytest.raises(InputError, match=message):
            read_decision(wrong)
