"""Why a label is given or not: the same as `predict` says over all labels, and in Python, the shell and over HTTP."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import extremis
from extremis.service import _explain
from schemas.errors import InputError
from scoring.predict import Model
from tests.command import call, refused

TEXT = "view of the sea with trees, oil on canvas"


@pytest.fixture(scope="module")
def model(exports: Path) -> Model:
    return extremis.load(exports, threads=1)


DECISIONS: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "best": lambda keys: {"max_labels": 4},
    "probability": lambda keys: {"min_probability": 0.1},
    "precision": lambda keys: {"precision": 0.3, "max_labels": 2},
    "at least": lambda keys: {"at_least": 3},
    "never": lambda keys: {"max_labels": 4, "never": keys[1:3]},
    "allowed": lambda keys: {"allowed": keys[2:7]},
    "groups": lambda keys: {"max_labels": 5, "groups": [keys[:3], keys[2:5]]},
}


@pytest.mark.parametrize("name", DECISIONS)
@pytest.mark.parametrize("text", [TEXT, ""])
def test_it_says_what_predict_says(model: Model, text: str, name: str) -> None:
    ranked = model.predict(text, max_labels=len(model.labels))[0].labels
    keys = [label.key for label in ranked]
    stated = DECISIONS[name](keys)
    (predicted,) = model.predict(text, **stated)
    scores, given = {label.key: label.score for label in ranked}, [label.key for label in predicted.labels]
    for key in [*keys[:9], keys[len(keys) // 3], keys[-1]]:
        why = model.explain(text, key, **stated)
        assert why.is_given == (key in given)
        assert why.rank == keys.index(key) + 1
        assert why.score == pytest.approx(scores[key], abs=1e-4)
        if why.is_given:
            assert why.reason == f"given, by {predicted.decision}"
            assert not why.gaps
            assert why.distance is None or why.distance > -1e-4
            continue
        if "below that of" in why.reason:
            assert why.distance is not None
            assert why.distance < 1e-4
            assert f"{-why.distance:.3f} below" in why.reason
        else:
            assert name in ("never", "allowed", "groups")
            assert ("does not allow it" in why.reason) == (name != "groups")
        assert why.against == (given[-1] if given else next(other for other in keys if other != key))
        assert sum(why.gaps.values()) == pytest.approx(why.score - scores[why.against], abs=1e-3)
        assert [*why.gaps.values()] == sorted(why.gaps.values())


def test_a_shell_and_a_request_say_the_same(model: Model, exports: Path) -> None:
    keys = [label.key for label in model.predict(TEXT, max_labels=40)[0].labels]
    for key, limits in ((keys[0], {}), (keys[39], {}), (keys[1], {"max_labels": 1})):
        options = [word for name, value in limits.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        done = call("explain", exports, TEXT, key, *options, "--threads", "1", "--json")
        why = model.explain(TEXT, key, **limits)
        assert done.json["rank"] == why.rank
        assert (done.json["reason"], done.json["gaps"]) == (why.reason, pytest.approx(why.gaps))
        (of_request,) = _explain(model, TEXT, [], [key], limits)["explained"].values()
        assert (of_request["reason"], of_request["gaps"]) == (why.reason, why.gaps)
    shown = call("explain", exports, TEXT, keys[39], "--max-labels", "3")
    assert f"{keys[39]}: not given: its score is" in shown.out
    assert f"rank 40 of {len(model.labels):,}; compared with {keys[2]}, most is missing in: " in shown.out
    refused(call("explain", exports, TEXT, "no such label"), "unknown label key 'no such label'")
    with pytest.raises(InputError, match="no such label"):
        model.explain(TEXT, "no such label")
