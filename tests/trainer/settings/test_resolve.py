"""Options that a recipe leaves to the data: what is filled in, what wins, what is refused, and what a run records."""

from dataclasses import replace

import pytest

from schemas.errors import InputError
from schemas.layout import RunLayout
from tests.builders import SmallData, build_data
from tests.recipes import RECIPES
from tests.training import silent, train
from trainer.inputs import open_queries
from trainer.loop import Trainer
from trainer.methods.keys import flatten
from trainer.methods.recipe import Recipe
from trainer.methods.settling import NOMINAL, DataStatistics, log_odds, settle
from trainer.recipe_files import load_config, load_recipe, read_recipe, validate
from trainer.settings.resolve import Resolved, measure_rows, resolve

TATE = DataStatistics(queries=15_000, labels=30_000, pairs=150_000, ngrams=70_000, tokens=20, median_frequency=3)
WORDNET = replace(TATE, queries=80_000, labels=100_000, pairs=100_000)
LARGE = DataStatistics(queries=100_000_000, labels=50_000_000, pairs=500_000_000, ngrams=50_000_000, tokens=20)
RULES = (
    *("order.batch", "train.epochs", "encoder.dimension", "encoder.hidden", "encoder.lr", "encoder.dense_lr"),
    *("encoder.buckets", "classifier.lr", "classifier.initial_bias", "classifier.initial_scale"),
    *("negatives.pool", "negatives.random", "negatives.hard", "negatives.warmup"),
    *("refresh.source", "refresh.start", "refresh.every"),
)
EVERY = tuple(f"{key}=auto" for key in RULES)


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://resolve/data", rows={"train": 90, "test": 5}, vocabulary=9)


def option(recipe: Recipe, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name, None)


def derived(name: str, facts: DataStatistics, *overrides: str) -> Resolved:
    return Resolved.of(read_recipe(name, overrides), facts, name)


def test_what_a_recipe_leaves_to_the_data_gets_numbers_and_reasons() -> None:
    body = read_recipe("astra", ["refresh.index=auto", "train.seed=3"])
    settled, reasons = settle(body, TATE)
    assert {"classifier.initial_bias", "order.batch", "negatives.pool"} <= reasons.keys()
    assert (settled["train"]["seed"], settled["refresh"]["index"]) == (3, "auto")  # for which "auto" is a value
    assert settle(settled, TATE) == (settled, {})
    assert body == read_recipe("astra", ["refresh.index=auto", "train.seed=3"])  # not changed
    wrong = {"method": "automatic", "order": 5, "encoder": {"kind": "none", "lr": "auto"}, "other": {"a": "auto"}}
    assert settle(wrong, TATE) == (wrong, {})


@pytest.mark.parametrize("facts", [TATE, WORDNET, LARGE], ids=["tate", "wordnet", "large"])
@pytest.mark.parametrize("name", RECIPES.values(), ids=RECIPES)
def test_every_recipe_can_be_resolved_on_any_size(name: str, facts: DataStatistics) -> None:
    resolved = derived(name, facts)
    left = {key for key, value in flatten(read_recipe(name)).items() if value in ("auto", "prior")}
    # An index within the trainer, where the data choose it, has no use for the schedule of tables.
    assert left - {"refresh.every"} <= resolved.settings.keys() <= left
    for key, value in resolved.settings.items():
        assert option(resolved.recipe, key) == value
        assert resolved.why[key]
    assert derived(name, facts) == resolved


@pytest.mark.parametrize("facts", [TATE, WORDNET, LARGE], ids=["tate", "wordnet", "large"])
def test_every_rule_gives_a_value_that_the_recipe_takes(facts: DataStatistics) -> None:
    resolved = derived("astra", facts, *EVERY)
    assert resolved.settings.keys() | {"refresh.every"} == set(RULES)
    assert resolved.recipe.classifier.initial_bias == pytest.approx(log_odds(facts.prior), abs=0.006)
    assert resolved.recipe.encoder.model_dump()["buckets"] >= min(facts.ngrams, 1 << 21)


def test_the_pool_goes_by_the_weight_of_a_draw() -> None:
    few, many = (derived("astra", facts).recipe for facts in (replace(TATE, labels=20_000), WORDNET))
    assert (few.negatives.pool, few.negatives.random, few.negatives.hard) == ("shared", 3200, 40)
    assert (many.negatives.pool, many.negatives.random, many.negatives.hard) == ("own", 400, 100)
    assert (few.refresh.source, few.refresh.start, few.classifier.initial_scale) == ("table", 3, 0)
    assert (many.refresh.source, many.refresh.start, many.classifier.initial_scale) == ("in-trainer", 0, 0.005)
    more = derived("astra", replace(WORDNET, labels=200_000)).recipe.refresh  # too many to search in every step
    assert (more.source, more.start, more.every) == ("table", 2, 1)
    # What goes by the pool goes by the one that is stated, too.
    stated = derived("astra", WORDNET, "negatives.pool=shared").recipe
    assert stated.negatives == few.negatives


def test_an_override_wins_and_is_no_setting(data: SmallData) -> None:
    overrides = ["train.epochs=3", "classifier.initial_bias=-1.5", "encoder.dimension=8"]
    resolved = resolve("astra", overrides, data.layout.root)
    recipe = resolved.recipe
    assert (recipe.train.epochs, recipe.classifier.initial_bias, recipe.encoder.dimension) == (3, -1.5, 8)
    assert not {"train.epochs", "classifier.initial_bias", "encoder.dimension"} & resolved.settings.keys()
    assert recipe.encoder.model_dump()["hidden"] == 16  # by the dimension that is stated
    # And the other way round: what a recipe states can be left to the data.
    assert resolve("decoupled", ["negatives.hard=auto"], data.layout.root).settings.keys() >= {"negatives.hard"}


def test_it_is_deterministic_and_goes_by_the_rows_that_are_trained_on(data: SmallData) -> None:
    first = resolve("astra", [], data.layout.root)
    assert resolve("astra", [], data.layout.root) == first
    assert first.lines(data.layout.root) == resolve("astra", [], data.layout.root).lines(data.layout.root)
    half = resolve("astra", ["data.share=0.5", "data.label_texts=false"], data.layout.root)
    rows = half.recipe.data.training_rows.rows(open_queries(data.layout, "train"))
    assert measure_rows(half.recipe, data.layout.root).points == rows == pytest.approx(45, abs=15)
    assert half.why["classifier.initial_bias"] != first.why["classifier.initial_bias"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("classifier.momentum=auto", r"recipe astra: classifier\.momentum: .* got 'auto'; this key cannot be 'auto'"),
        ("train.decay=prior", r"train\.decay: .* got 'prior'; this key cannot be 'auto'"),
        ("data.split=auto", "no split 'auto'"),
        ("train.epochs=prior-ish", r"train\.epochs: .*integer.*got 'prior-ish'"),
        ("encoder.bucketss=auto", r"unknown key 'encoder\.bucketss', did you mean 'buckets'"),
    ],
)
def test_an_option_that_no_rule_decides_is_refused(data: SmallData, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve("astra", [override], data.layout.root)


def test_an_option_of_another_kind_is_neither_filled_in_nor_asked_for(data: SmallData) -> None:
    with pytest.raises(InputError, match=r"head\.label_batch: .* got 'auto'; this key cannot be 'auto'"):
        resolve("astra", ["method=dexml", "head.label_batch=auto"], data.layout.root)
    transformer = ["encoder.kind=transformer", "encoder.model=x", "encoder.lr=2e-4"]
    settings = resolve("astra", transformer, data.layout.root).settings
    assert "encoder.dimension" in settings
    assert not {"encoder.buckets", "encoder.hidden", "encoder.dense_lr", "encoder.lr"} & settings.keys()
    with pytest.raises(InputError, match=r"encoder\.buckets works only with encoder\.kind = 'bag', not with 'transf"):
        resolve("astra", [*transformer, "encoder.buckets=auto"], data.layout.root)


def test_the_numbers_land_in_the_config_of_a_run(data: SmallData) -> None:
    small = ["encoder.dimension=8", "train.epochs=1", "logging.tensorboard=false", "order.threads=0"]
    resolved = resolve("astra", small, data.layout.root)
    run = RunLayout("memory://resolve/run")
    train(Trainer.start(data.layout.root, run.root, resolved.recipe, silent))
    config = load_config(run.config)["recipe"]
    assert settle(config, NOMINAL) == (config, {})
    assert validate(config, run.root) == resolved.recipe
    assert resolved.settings.items() <= flatten(config).items()


def test_without_data_a_recipe_is_settled_for_usual_data() -> None:
    for name in RECIPES.values():
        assert load_recipe(name) == derived(name, NOMINAL).recipe
    assert load_recipe("astra", ["method=renee"]) == load_recipe("renee", ["name=astra"])
