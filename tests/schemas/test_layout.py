"""Paths are parsed as they were built."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout, check_folder, check_name, parse_number, shard_name, staging

numbers = st.integers(0, 10**9)


def test_shard_names() -> None:
    assert shard_name(7, 64) == "part-00007-of-00064.parquet"
    assert shard_name(123456, 10**6, "tar") == "part-123456-of-1000000.tar"


@given(numbers)
def test_numbered_folders(number: int) -> None:
    run = RunLayout("s3://bucket/run")
    for url in (run.checkpoint(number), run.dump(number)):
        assert parse_number(url.rsplit("/", 1)[1]) == number
    assert parse_number(run.negatives(number, "labels").split("/")[-2]) == number
    assert run.embeddings(number, "queries").startswith(run.dump(number) + "/")
    assert run.vectors(number).startswith(run.dump(number) + "/")
    assert run.adoption(number).startswith(run.adoptions + "/")


@given(st.lists(numbers, min_size=2, max_size=2, unique=True).map(sorted))
def test_numbered_folders_below_a_hundred_million_sort_by_number(pair: list[int]) -> None:
    low, high = (number % 10**8 for number in pair)
    run = RunLayout("run")
    assert (run.checkpoint(low) < run.checkpoint(high)) == (low < high)


@pytest.mark.parametrize("name", [".tmp-x", "epoch", "epoch-", "epoch-1x", "metrics.jsonl", "my-epoch-1"])
def test_other_folders_have_no_number(name: str) -> None:
    assert parse_number(name) is None


@pytest.mark.parametrize("name", ["2026-11-20", "0002", "a" * 128, "A_b-1.c", "-x", "_"])
def test_a_new_name_has_plain_characters(name: str) -> None:
    assert check_name("--part", name) == check_folder(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".x", "a b", "a/b", "a\\b", "d[1]", "ü", "a\n", "\x1b", "a" * 129, "a" * 9999]
)
def test_another_new_name_is_refused_in_one_short_line(name: str) -> None:
    with pytest.raises(InputError, match=r"--part '.*: a name consists of 1 to 128 of .* Choose another") as error:
        check_name("--part", name)
    assert len(str(error.value)) < 300
    assert str(error.value).isprintable()


def test_tables_of_data_stand_apart() -> None:
    data = DataLayout("/data/")
    urls = [data.labels, data.tokenizer, data.queries("train"), data.queries("test"), staging(data.root)]
    assert len(set(urls)) == len(urls)
    assert all(url.startswith("/data/") for url in urls)
