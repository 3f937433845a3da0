"""Recipes: what is known, what is refused and how it is said, and that they come back as they were saved."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from schemas import storage
from schemas.errors import ClaimedError, InputError
from schemas.owners import Owner
from tests.command import ROOT
from tests.recipes import RECIPES
from trainer.methods.settling import NOMINAL, settle
from trainer.recipe_files import (
    changed_versions,
    dump_config,
    load_config,
    load_recipe,
    read_recipe,
    recipe_names,
    tomllib,
    validate,
)


def toml(folder: Path, text: str) -> str:
    (folder / "mine.toml").write_text(text)
    return str(folder / "mine.toml")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_valid_and_comes_back_from_config_toml(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES[name])
    assert recipe.name == name
    url = str(tmp_path / "config.toml")
    storage.write_bytes(url, dump_config(recipe, data={"digest": "abc"}))
    config = load_config(url)
    assert validate(config["recipe"], url) == recipe
    assert config["data"] == {"digest": "abc"}
    assert {"extremis", "python", "torch", "numpy"} <= config["versions"].keys()
    assert changed_versions(config) == ""
    before = {"versions": {**config["versions"], "torch": "1.0"}}
    assert changed_versions(before) == f"started with torch 1.0, resumed with torch {config['versions']['torch']}"


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("negatives.rndom=5", "negatives.rndom", "random"),
        ("trian.epochs=5", "trian", "train"),
        ("encoder.dimensions=8", "encoder.dimensions", "dimension"),
    ],
)
def test_an_unknown_key_names_the_nearest(override: str, key: str, nearest: str) -> None:
    with pytest.raises(InputError, match=rf"unknown key '{key}', did you mean '{nearest}'\?"):
        load_recipe("astra", [override])


def test_an_unknown_key_near_nothing_names_the_known_ones() -> None:
    with pytest.raises(
        InputError, match=r"unknown key 'refresh.zzz', known: source, start, every, stale, max_age, wait_seconds"
    ):
        load_recipe("astra", ["refresh.zzz=1"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.epochs=0"], "train.epochs: .*greater than or equal to 1, got 0"),
        (["encoder.dropout=1.0"], "encoder.dropout: .*less than 1"),
        (["train.epochs=many"], "train.epochs: .*integer.*got 'many'"),
        (["train.decay=cut"], "train.decay: .*'cosine' or 'linear'.*got 'cut'"),
        (["order.batch=100"], "order.streams = 8 does not divide order.batch = 100"),
        (["order=5"], "order: .*got 5"),
        (["negatives.random=0", "negatives.hard=0"], "no negatives at all"),
        (["negatives.hard=8", "negatives.width=4"], "negatives.width = 4 is below negatives.hard = 8"),
        (
            ["method=renee", "negatives.hard=3"],
            "negatives.hard works only with method = 'astra' or 'dexml', not with 'renee'",
        ),
        (
            ["method=astro"],
            "method = 'astro': expected one of 'astra', 'renee', ",
        ),
        (["encoder.kind=transformer"], "needs encoder.model"),
        (
            ["encoder.kind=transformer", "encoder.model=x", "encoder.inputs=features"],
            "a transformer reads token ids only; set encoder.kind = 'bag'",
        ),
        (["encoder.buckets=0"], "needs encoder.buckets > 0"),
        (["data.mix.train=1.0"], "data.label_texts = true, but data.mix.*add labels = 1.0 to data.mix, or set"),
        (["data.split=val", "data.mix={train = 1.0, labels = 1.0}"], "data.split = 'val' is not in data.mix"),
        (["data.mix={train = 0.0, labels = 1.0}"], "data.mix.train: .*greater than 0, got 0"),
        (["data.mix={train = inf, labels = 1.0}"], "data.mix.train: .*finite number, got inf"),
        (["data.mix={train = 1e4, labels = 1.0}"], "data.mix.train: .*less than or equal to 1000, got 10000"),
        (["data.mix_by=shares"], "data.mix_by needs sources: set data.mix, which names the sources"),
        (["data.mix={vectors = 1.0, labels = 1.0}"], "data.mix.vectors: .*give the split another name"),
        (
            ["data.mix={train = 2.0, labels = 0.5}"],
            "labels = 0.5 is below 1, .*multiply all weights .*or set negatives.hard = 0",
        ),
        (["refresh.start=1"], "refresh.start = 1 is too early: .*Set 2 or more"),
        (["storage.cache=/c"], "storage.cache = '/c' needs a limit: set storage.cache_size"),
        (["storage.cache_size=1GiB"], "storage.cache_size is the limit of a cache: set storage.cache"),
        (
            ["storage.cache=/c", "storage.cache_size=much"],
            "storage.cache_size = 'much': expected a number with a unit, .*8GiB",
        ),
        (["storage.cache=s3://b/c", "storage.cache_size=1GiB"], "expected a directory on a local disk, got a URL"),
        (["storage.damaged=mend"], "storage.damaged: .*'stop' or 'skip'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_key_and_the_value(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe("astra", overrides)


def test_a_mix_is_weights_by_name(tmp_path: Path) -> None:
    mixed = toml(tmp_path, 'extends = "astra"\n[data.mix]\ntrain = 1\nmarket_de = 1.5\nlabels = 2.0\n')
    assert load_recipe(mixed).data.mix == {"train": 1.0, "market_de": 1.5, "labels": 2.0}
    thin = load_recipe("random", ["data.mix.train=0.25", "data.mix.labels=1"])
    assert thin.data.mix == {"train": 0.25, "labels": 1.0}
    assert load_recipe("astra").data.mix == {}
    # Of shares every row comes once at least, so that they go with mined tables.
    assert load_recipe("astra", ["data.mix={train = 0.7, labels = 0.3}", "data.mix_by=shares"]).data.mix


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(InputError, match=r"train\.epochs: .*; .*unknown key 'train\.epoch'") as refusal:
        load_recipe("astra", ["train.epochs=0", "train.epoch=5"])
    assert str(refusal.value).startswith("recipe astra: ")
    assert refusal.value.exit_status == 2


def test_overrides_are_toml_values_and_bare_words_are_strings() -> None:
    recipe = load_recipe(
        "astra",
        ["train.epochs=3", "encoder.lr=1e-3", "data.label_texts=false", "validation.split=val", 'refresh.index="Flat"'],
    )
    assert (recipe.train.epochs, recipe.encoder.lr, recipe.data.label_texts) == (3, 1e-3, False)
    assert (recipe.validation.split, recipe.refresh.index) == ("val", "Flat")
    assert load_recipe("astra", ["train.epochs=3", "train.epochs=4"]).train.epochs == 4


@pytest.mark.parametrize("override", ["train.epochs", "=3", ".epochs=3", "train.=3"])
def test_an_override_without_key_or_value_shows_the_form(override: str) -> None:
    with pytest.raises(InputError, match=r"expected section\.key=value"):
        load_recipe("astra", [override])


def test_an_override_below_a_value_is_refused() -> None:
    with pytest.raises(InputError, match="'epochs' is a value, not a section"):
        load_recipe("astra", ["train.epochs=3", "train.epochs.last=3"])


def test_an_unknown_recipe_names_the_nearest_and_all() -> None:
    with pytest.raises(InputError, match=r"unknown recipe 'astro': expected one of .*astra.*Did you mean 'astra'\?"):
        load_recipe("astro")
    with pytest.raises(InputError, match=r"unknown recipe 'autoo': expected one of auto, .*Did you mean 'auto'\?"):
        load_recipe("autoo")
    with pytest.raises(InputError, match=r"auto is not a recipe.* Run `extremis run auto DATA RUN`"):
        load_recipe("auto")


def test_a_recipe_from_a_file(tmp_path: Path) -> None:
    assert load_recipe(toml(tmp_path, "[train]\nepochs = 2\n")).train.epochs == 2
    with pytest.raises(InputError, match="file not found"):
        load_recipe(str(tmp_path / "other.toml"))
    with pytest.raises(InputError, match=r"not TOML: .*line 2"):
        load_recipe(toml(tmp_path, "[train]\nepochs = = 2\n"))
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8"):
        load_recipe(str(tmp_path / "mine.toml"))


def test_a_recipe_extends_one_that_is_whole(tmp_path: Path) -> None:
    mine = load_recipe(toml(tmp_path, 'extends = "astra"\n[train]\nepochs = 2\n'))
    base = load_recipe("astra")
    assert mine.train.epochs == 2
    assert mine.model_copy(update={"train": base.train, "name": "astra"}) == base
    assert not [
        name for name in recipe_names() if "extends" in tomllib.loads((ROOT / f"recipes/{name}.toml").read_text())
    ]
    (tmp_path / "base.toml").write_text('extends = "astra"\nname = "base"\n')
    with pytest.raises(InputError, match=r"mine.toml: extends .*base.toml, which extends astra; .* Extend astra, and"):
        load_recipe(toml(tmp_path, 'extends = "base.toml"\n'))
    for itself in (tmp_path / "mine.toml", "mine.toml", f"../{tmp_path.name}/mine.toml"):
        with pytest.raises(InputError, match=r"mine.toml: extends .*mine.toml, which extends"):
            load_recipe(toml(tmp_path, f'extends = "{itself}"\n'))


@pytest.mark.parametrize("root", ["", "/", "memory://", "memory://bucket/"])
def test_a_path_that_a_recipe_extends_is_seen_from_its_folder(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has the same name in the current folder is another recipe; a name of those that ship stays a name."""
    monkeypatch.chdir(tmp_path)
    toml(tmp_path, "[train]\nepochs = 1\n")
    (tmp_path / "astra").mkdir()
    place = root if "memory" in root else str(tmp_path) + "/" if root else ""
    for name, text in {
        "recipes/base.toml": "[train]\nepochs = 7\n",
        "recipes/mine.toml": 'extends = "base.toml"\n[train]\nseed = 5\n',
        "recipes/day/mine.toml": 'extends = "../base.toml"\n[train]\nseed = 5\n',
        "base.toml": "[train]\nepochs = 8\n",
        "recipes/named.toml": 'extends = "astra"\n[train]\nseed = 5\n',
    }.items():
        storage.write_bytes(place + name, text.encode())
    for name in ("mine", "day/mine"):
        recipe = load_recipe(f"{place}recipes/{name}.toml")
        assert (recipe.name, recipe.train.seed, recipe.train.epochs) == ("mine", 5, 7)
    assert load_recipe(f"{place}recipes/named.toml").train.positive_weight == load_recipe("astra").train.positive_weight


def test_no_run_says_how_to_start_one() -> None:
    with pytest.raises(InputError, match=r"no run here\. Start a run with `extremis run`"):
        load_config("memory://nowhere/config.toml")
    elsewhere = replace(Owner.here("trained"), machine="another")
    storage.write_bytes("memory://busy/.claim.json", storage.seal(json.dumps(asdict(elsewhere)).encode()))
    with pytest.raises(ClaimedError, match="not written yet; the run is being trained by process"):
        load_config("memory://busy/config.toml")


def test_a_kind_has_its_own_options_alone() -> None:
    assert set(load_recipe("astra").model_dump()["loss"]) == {"kind", "temperature", "chunk"}
    transformer = load_recipe("astra", ["encoder.kind=transformer", "encoder.model=x"]).model_dump()["encoder"]
    assert {"model", "pooling"} <= transformer.keys()
    assert not {"buckets", "ngrams"} & transformer.keys()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["encoder.precision=bfloat16"],
            "encoder.precision works only with encoder.kind = 'transformer', not with 'bag'",
        ),
        (["loss.radius=1.0"], "loss.radius works only with loss.kind = 'triplet', not with 'bce': leave this key out"),
        (
            ["encoder.ngram_weight=2", "encoder.kind=transformer", "encoder.model=x"],
            "encoder.ngram_weight works only with encoder.kind = 'bag', not with 'transformer': leave this key out",
        ),
        (["encoder.kind=bags"], "encoder.kind = 'bags': expected one of 'bag', 'transformer'"),
        (["loss.kind=[1]"], r"loss.kind = \[1\]: expected one of 'bce', 'softmax'"),
        (["encoder.kind=transformer", "encoder.model=x", "encoder.modl=y"], "'encoder.modl', did you mean 'model'"),
    ],
)
def test_a_key_of_another_kind_is_refused_with_its_kind(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe("astra", overrides)


def test_keys_of_the_old_kind_fall_away_with_it(tmp_path: Path) -> None:
    """`astra` states options of a bag; those beside or above the new kind are faults."""
    mine = toml(
        tmp_path, 'extends = "astra"\n[encoder]\nkind = "transformer"\nmodel = "x"\n[loss]\nkind = "softtopk"\n'
    )
    recipe = load_recipe(mine)
    assert (recipe.encoder.kind, recipe.loss.kind) == ("transformer", "softtopk")
    _, reasons = settle(read_recipe(mine), NOMINAL)
    assert {key for key in reasons if key.startswith("encoder.")} == {"encoder.dimension", "encoder.lr"}
    assert load_recipe(mine, ["loss.k=3"]).loss.model_dump()["k"] == 3
    with pytest.raises(InputError, match=r"encoder\.hidden works only with encoder\.kind = 'bag'"):
        load_recipe(mine, ["encoder.hidden=8"])
    again = load_recipe(mine, ["encoder.kind=bag", "encoder.optimizer=sgd"])
    assert again.encoder.model_dump()["optimizer"] == "sgd"
    with pytest.raises(InputError, match=r"loss\.k works only with loss\.kind = 'softtopk', not with 'bce'"):
        load_recipe(toml(tmp_path, 'extends = "astra"\n[loss]\nkind = "bce"\nk = 3\n'))


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        ("[encoder]\nngram_wieght = 0.1\n", ["encoder.kind=transformer", "encoder.model=x"], "'encoder.ngram_wieght'"),
        ('[loss]\nkind = "triplet"\nmagrin = 1\n', ["loss.kind=bce"], "'margin' of loss.kind = 'triplet'"),
        ("[refresh]\nevry = 3\nevery = 3\n", ["refresh.source=in-trainer"], "'refresh.evry'"),
        ("[refresh]\nevry = 3\nevery = 3\n", ["method=renee"], "refresh works only with method = 'astra'"),
        ("[negatives]\nhadr = 3\nhard = 3\n", ["method=renee"], "'negatives.hadr', did you mean 'hard' of method"),
        ("[negatvies]\nhard = 3\n", ["method=renee"], "unknown key 'negatvies', did you mean 'negatives'"),
        (
            'method = "lns"\n[negatives.lsh]\nbit = 3\nbits = 3\n',
            ["method=astra"],
            "'negatives.lsh.bit'|lsh works only",
        ),
    ],
)
def test_a_misspelt_key_of_what_a_recipe_extends_does_not_vanish(
    base: str, changes: list[str], message: str, tmp_path: Path
) -> None:
    """Keys fall away with their method or kind only if it has them."""
    (tmp_path / "base.toml").write_text(base)
    (tmp_path / "mine.toml").write_text('extends = "base.toml"\n')
    for source in ("base", "mine"):
        with pytest.raises(InputError, match=message):
            load_recipe(str(tmp_path / f"{source}.toml"), changes)


def test_recipes_are_listed_without_what_implements_them() -> None:
    """A bare installation has neither PyTorch nor numba."""
    code = (
        "import sys\n"
        "for name in ('torch', 'numba', 'scipy', 'transformers'): sys.modules[name] = None\n"
        "from extremis.cli import main; main(['recipes', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [*json.loads(done.stdout.splitlines()[-1])] == ["auto", *recipe_names()]
