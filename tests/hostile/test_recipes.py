"""Recipes and settings that no run can be made of: refused before anything is written."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import InputError
from schemas.options import Options
from tests.hostile.outcome import check_message, listing, run
from trainer.methods.keys import classes_at, methods_of
from trainer.methods.recipe import Recipe
from trainer.recipe_files import load_recipe

VALUES = ["inf", "-inf", "nan", "-1", "1e30", "10" * 20, "1" * 5000, '"text"', "[]", "{}", "[[1]]", "true", '"\\u0000"']
DEEP = "[" * 20_000


def options(section: type[Options], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, type) of every option of a section."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Options):
            yield from options(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


OPTIONS = {  # of all methods and kinds
    name: kind
    for method in methods_of(None)
    for section in method.model_fields
    for each in classes_at([method], section)
    for name, kind in options(each, f"{section}.")
}
# What no run can take, of options of each type.
SURE = {
    int: ("inf", "nan", "-5", "10" * 20, "1" * 5000, '"text"', "[]", "true", "false"),
    float: ("inf", "-inf", "nan", '"text"', "{}", "true", "false"),
}


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> tuple[Recipe | None, str]:
    """Load a recipe: it, or the message why there is none."""
    try:
        return load_recipe(str(recipe), list(overrides)), ""
    except InputError as error:
        check_message(f"error: {error}")
        return None, str(error)


def test_any_value_gives_a_recipe_of_finite_numbers_or_one_message() -> None:
    for name in OPTIONS:
        for value in VALUES:
            recipe, _ = load("random", [f"{name}={value}"])
            numbers = [each for section in recipe.model_dump().values() for each in flat(section)] if recipe else []
            assert all(math.isfinite(number) for number in numbers), f"{name}={value}"


def test_no_number_is_infinite_or_text_or_true() -> None:
    numbers = [name for name, kind in OPTIONS.items() if kind in SURE]
    assert {"train.epochs", "encoder.lr"} <= set(numbers)
    for name in numbers:
        of_others = {
            "order.cluster": "ngame",
            "refresh.every_steps": "in-trainer",
            "refresh.rebuild_steps": "in-trainer",
        }
        recipe = next((recipe for key, recipe in of_others.items() if name.startswith(key)), "random")
        taken = [value for value in SURE[OPTIONS[name]] if load(recipe, [f"{name}={value}"])[0]]
        assert taken == [], name


def flat(section: Any) -> list[float]:
    values = section.values() if isinstance(section, dict) else [section]
    return [value for value in values if isinstance(value, (int, float))]


SETTINGS = [
    ("classifier.initial_bias=nan", "finite"),
    ("encoder.lr=inf", "finite"),
    ("encoder.lr=10001", "encoder.lr: expected a number less than or equal to 10000"),
    ("encoder.dense_lr=1e5", "less than or equal"),
    ("classifier.lr=1e30", "less than or equal"),
    ("classifier.weight_decay=1", "less than 1"),
    ("encoder.weight_decay=1.0", "less than 1"),
    ("encoder.dropout=1", "less than 1"),
    ("encoder.feature_dropout=1", "less than 1"),
    ("train.epochs=true", "train.epochs: expected a value other than true or false, got True"),
    ("data.mix.train=true", "data.mix"),
    ("classifier.lr=-inf", "finite"),
    ("encoder.buckets=1000000000000", "less than or equal"),
    ("negatives.random=1000000000000", "less than or equal"),
    ("negatives.hard=1000000000000", "less than or equal"),
    ("train.threads=100000", "less than or equal"),
    ("order.threads=100000", "less than or equal"),
    ("storage.fetch_threads=100000", "less than or equal"),
    ("train.epochs=" + "9" * 30, "bits"),
    ("train.seed=-1", "greater than or equal"),
    ("encoder.lr=" + "9" * 5000, "encoder.lr"),
    ("encoder.lr=" + "[" * 20_000, "encoder.lr"),
    (".".join(["a"] * 3000) + "=1", "a key with 3,000 parts"),
    ("=1", "section.key=value"),
    ("train.epochs", "section.key=value"),
    ("train=1", "train"),
    ("train.epochs=-1", "got -1"),
    ("train.epochs=many", "'many'"),
    ("encodr.lr=0.1", "unknown key 'encodr'"),
    ("encodr.lr=0.1", "did you mean 'encoder'?"),
    ("encoder.kind=\\u0000", "expected one of"),
    ("loss.kind=__import__('os')", "expected one of"),
    ("encoder.kind=[1]", "expected one of"),
    ("method=os:system", "no module 'os'"),
    ("method=json:dumps", "expected a Recipe"),
]


def test_a_setting_that_cannot_be() -> None:
    for setting, words in SETTINGS:
        assert words in load("random", [setting])[1], setting[:30]


FILES: dict[str, tuple[bytes, str]] = {
    "nested": (b"a = " + b"[" * 20_000 + b"]" * 20_000, "nested deeper"),
    "nested but readable": (b"a = " + b"[" * 50 + b"]" * 50, "nested deeper"),
    "dotted": (b"[" + b".".join([b"a"] * 500) + b"]\nb = 1\n", "nested deeper"),
    "digits": (b"[train]\nepochs = " + b"9" * 5000, "not TOML"),
    "empty key": (b" = 1", "not TOML"),
    "cut off": (b"[train", "not TOML"),
    "NUL": (b"\0", "not TOML"),
    "bytes": (bytes(range(128, 256)), "not UTF-8"),
    "UTF-16": ("[train]".encode("utf-16"), "not UTF-8"),
    "a section twice": (b"[train]\n[train]\n", "not TOML"),
    "a list for a section": (b"train = [1]\n", "train"),
    "a number for a section": (b"train = 1\n", "train"),
    "extends itself": (b'extends = "HERE"\n', "which extends"),
    "extends a number": (b"extends = 3\n", "unknown recipe '3'"),
    "extends nothing": (b'extends = "nothing"\n', "unknown recipe 'nothing'"),
    "extends a folder": (b'extends = "/tmp.toml"\n', "file not found"),
    "too long": (b"# " + b"x" * (1 << 20), "characters"),
    "a date": (b"[train]\nepochs = 1979-05-27\n", "train.epochs"),
    "infinite": (b"[train]\nwarmup = inf\n", "train.warmup"),
    "unknown": (b"[train]\nepoch = 1\n", "did you mean 'epochs'"),
    "unknown section": (b"[trian]\nepochs = 1\n", "did you mean 'train'"),
    "a mix that deals nothing": (b"[data.mix]\ntrain = 0\n", "data.mix"),
    "a mix of NaN": (b"[data.mix]\ntrain = nan\n", "data.mix"),
}


def test_a_file_that_is_no_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    for name, (content, words) in FILES.items():
        path.write_bytes(content.replace(b"HERE", str(path).encode()))
        assert words in load(path)[1], name
    path.unlink()
    path.mkdir()
    assert "a directory" in load(path)[1]


@pytest.mark.parametrize(
    ("recipe", "setting", "words"),
    [
        ("random", "encoder.lr=inf", "finite"),
        ("random", "encoder.lr=" + DEEP, "encoder.lr"),
        ("random", "train.epoch=1", "unknown key 'train.epoch'"),
        ("random", "train.epoch=1", "did you mean 'epochs'"),
        ("random", "order.batch=10", "does not divide order.batch = 10"),
        ("astr", "train.epochs=1", "Did you mean 'astra'?"),
        ("no/recipe.toml", "train.epochs=1", "no/recipe.toml: file not found"),
        ("random", 'data.mix={"../train"=1.0, labels=1.0}', "no split"),
        ("random", "data.split=../../etc", "no split"),
    ],
)
def test_a_command_tells_of_it(recipe: str, setting: str, words: str, loop: tuple[Path, Any], tmp_path: Path) -> None:
    for verb in ("train", "run"):
        run(verb, recipe, loop[0] / "data", tmp_path / "run", "--set", setting, words=(words,))
    assert listing(tmp_path) == []


KEYS = st.sampled_from(sorted(OPTIONS))
HOSTILE = st.one_of(
    st.text(max_size=20), st.integers().map(str), st.floats().map(str), st.sampled_from(VALUES), st.just(DEEP)
)


@settings(max_examples=150)
@given(st.lists(st.tuples(KEYS, HOSTILE), min_size=1, max_size=4))
def test_settings_give_a_recipe_or_one_message(overrides: list[tuple[str, str]]) -> None:
    recipe, message = load("random", [f"{name}={value}" for name, value in overrides])
    assert recipe is not None or message
