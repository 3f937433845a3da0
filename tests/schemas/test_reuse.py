"""A table is kept, made again or refused: by its kind, its parents and the parameters that decide its content."""

from pathlib import Path
from typing import Any

import pytest

from schemas.errors import InputError
from schemas.manifest import Manifest, publish
from schemas.table import Request, find_by_parents, find_reusable

PARENTS = {"queries": "a" * 64, "vectors": "b" * 64}
OTHER_PARENTS = PARENTS | {"vectors": "c" * 64}
PARAMETERS = {"width": 5, "ranges": [[0, 3]], "margin": None, "epoch": 3}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A finished table, which has counted something besides."""
    place = str(tmp_path / "table")
    publish(place, Manifest(kind="negatives", parents=PARENTS, parameters=PARAMETERS | {"counted": 7}))
    return place


def request(parents: dict[str, str] | None = None, **changes: Any) -> Request:
    return Request("negatives", parents or PARENTS, PARAMETERS | changes)


def find(url: str, wanted: Request, **options: Any) -> Manifest | None:
    return find_reusable(url, wanted, "Give --overwrite.", **options)


def test_the_same_table_is_kept_whatever_else_is_asked(url: str) -> None:
    for changes in ({}, {"ranges": [(0, 3)]}, {"unheard_of": None}):
        kept = find(url, request(**changes), overwrite=True, is_stale=lambda old: True, check_replaceable=pytest.fail)
        assert kept is not None
        assert kept.parents == PARENTS
    assert find(url + "/none", request()) is None


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            request(width=6, margin=0.1),
            r"\(width was 5, now it is 6; margin was not set, now it is 0.1\)",
        ),
        (request(OTHER_PARENTS), r"\(other vectors\)\. Give --overwrite\."),
        (request(PARENTS | {"order": "d" * 64}), r"\(other order\)"),
        (
            Request("vectors", PARENTS, PARAMETERS),
            "contains a finished negatives table, but this command writes a vectors table",
        ),
        (Request("negatives", PARENTS, PARAMETERS, section="clusters"), "but this command writes a"),
    ],
)
def test_any_other_is_refused_with_what_differs(url: str, wanted: Request, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find(url, wanted)


def test_it_is_made_again_on_request_or_when_stale_after_a_last_check(url: str) -> None:
    checked: list[tuple[str, Manifest]] = []
    for wanted, options in (
        (request(width=6), {"overwrite": True}),
        (request(OTHER_PARENTS), {"is_stale": lambda old: old["epoch"] == 3}),
    ):
        assert find(url, wanted, check_replaceable=lambda *table: checked.append(table), **options) is None
    assert [place for place, _ in checked] == [url, url]
    # Only other parents make a table stale.
    with pytest.raises(InputError, match="width was 5"):
        find(url, request(width=6), is_stale=lambda old: True)


def test_a_section_of_the_parameters_and_nested_ones_are_compared(tmp_path: Path) -> None:
    file = {"file": "a.txt", "bytes": 9, "sha256": "e" * 64}
    parameters = {"clusters": {"size": 4, "count": 2}, "input": {"train": file}, "options": {"seed": 0, "text": None}}
    publish(str(tmp_path), Manifest(kind="data", parents=PARENTS, parameters=parameters))
    for same in (
        Request("data", None, {"size": 4}, section="clusters"),
        Request("data", None, {"input": {"train": file}, "options": {"seed": 0}}),
    ):
        assert find(str(tmp_path), same) is not None
    with pytest.raises(InputError, match="size was 4, now it is 5"):
        find(str(tmp_path), Request("data", None, {"size": 5}, section="clusters"))
    nested = {"input": {"train": file | {"bytes": 8}}, "options": {"seed": 1, "text": None}}
    with pytest.raises(
        InputError, match=r"input.train was a.txt \(9 bytes, SHA-256 e+….*; options.seed was 0, now it is 1"
    ):
        find(str(tmp_path), Request("data", None, nested))


def test_a_table_of_the_same_parents_is_found_whatever_its_parameters(url: str) -> None:
    assert find_by_parents(url, "negatives", PARENTS) is not None
    assert find_by_parents(url, "negatives", OTHER_PARENTS) is None
    assert find_by_parents(url + "/none", "negatives", PARENTS) is None
