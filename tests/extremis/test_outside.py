"""A method and a score in files of somebody's own, outside the checkout: run, resumed, evaluated, exported, served."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import extremis
from schemas.errors import InputError
from schemas.layout import RunLayout
from tests.builders import build_data
from tests.command import ROOT, call, environment, refused, sets
from tests.command import extremis as command
from tests.ranks import on_ranks
from tests.training import assert_resumes, silent, train
from trainer.group import Group
from trainer.loop import Trainer
from trainer.recipe_files import load_config, load_recipe

EXAMPLES = ROOT / "examples" / "extending"
CHANGES = sets("train.epochs=3", "refresh.stale=wait", "data.holdout=0.1", "logging.tensorboard=false")
TINY = ("encoder.dimension=8", "encoder.buckets=64", "encoder.hidden=4", "order.batch=16", "negatives.hard=0")
MORE = ("train.epochs=2", "train.threads=1", "logging.tensorboard=false", "checkpoint.every_steps=3")

# What a reader of RUN does, in a process and a folder that know of no module.
READS = """
import json, sys
import extremis

data, run, out = sys.argv[1:]
metrics = extremis.evaluate(data, run, split="holdout", progress=False).metrics
extremis.export(data, run, out, progress=False)
labels = extremis.load(out).predict(["a ship in a storm"], max_labels=3)[0].labels
assert not [name for name in sys.modules if "spread" in name], "the module was imported"
print(json.dumps([metrics["P@1"], [label.key for label in labels]]))
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a method, its recipe and a score."""
    folder = tmp_path_factory.mktemp("mine")
    for name in ("spread.py", "spread.toml", "product.py"):
        shutil.copy(EXAMPLES / name, folder)
    return folder


@pytest.fixture(scope="module")
def run(data: Path, mine: Path) -> Path:
    """A run of the method, with its miner, in processes of their own."""
    report = command("run", mine / "spread.toml", data, mine / "run", *CHANGES, "--json", cwd=data).json
    assert report["table_versions"] == {"0": None, "1": None, "2": 2}
    return mine / "run"


def reads(data: Path, run: Path, out: Path) -> list:
    arguments = [sys.executable, "-c", READS, data, run, out]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment(), cwd=out.parent, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_who_reads_the_run_needs_no_module(data: Path, run: Path, tmp_path: Path) -> None:
    precision, keys = reads(data, run, tmp_path / "exported")
    assert 0 < precision <= 100
    assert len(keys) == 3
    assert call("evaluate", data, run, "--split", "holdout", "--json").json["metrics"]["P@1"] == precision


@pytest.mark.slow
def test_a_resume_says_that_the_module_has_changed(data: Path, mine: Path, run: Path) -> None:
    again = ("train", mine / "spread.toml", data, run, *CHANGES, "--resume")
    recorded = load_config(str(run / "config.toml"))["modules"]["spread:Spread"]
    assert "spread:Spread" not in command(*again).err
    before = (mine / "spread.py").read_text()
    (mine / "spread.py").write_text(f"{before}\n# changed\n")
    try:
        assert f"spread:Spread has changed since the run was started (SHA-256 {recorded[:12]}" in command(*again).err
    finally:
        (mine / "spread.py").write_text(before)


def test_the_recipe_of_a_run_says_where_its_module_is_missing(data: Path, run: Path, tmp_path: Path) -> None:
    done = command("train", run / "config.toml", data, tmp_path / "again", check=False)
    refused(done, "method = 'spread:Spread': no module 'spread' in", "or add its folder to PYTHONPATH")
    command("recipes", "validate", run / "config.toml", env={"PYTHONPATH": f"{EXAMPLES}:{ROOT}"})


def test_a_key_of_the_method_is_checked(mine: Path) -> None:
    done = call("recipes", "validate", mine / "spread.toml", "--set", "spread.wieght=1")
    refused(done, "unknown key 'spread.wieght', did you mean 'weight'?")
    refused(call("recipes", "validate", "astra", "--set", "method=json:dumps"), "json:dumps", "expected a Recipe")


@pytest.mark.slow
def test_a_score_needs_its_module_wherever_it_is_read(data: Path, mine: Path, run: Path, tmp_path: Path) -> None:
    fused, own = tmp_path / "run", {"PYTHONPATH": f"{mine}:{ROOT}"}
    shutil.copytree(run, fused)
    fitted = command("fuse", data, fused, "--by", "product:fit", "--json", cwd=mine).json
    assert (fitted["by"], len(fitted["sha256"])) == ("product:fit", 64)
    out, predict = tmp_path / "exported", ("--data", data, "--split", "test")
    named = "EXTREMIS_ALLOW=product:Product"
    refused(command("evaluate", data, fused, check=False), "score.json needs code from outside", named)
    command("export", data, fused, out, env={**own, "EXTREMIS_ALLOW": "product:Product"})
    refused(command("predict", out, tmp_path / "p.jsonl", *predict, check=False), "fusion-score.json", named)
    command("predict", out, tmp_path / "p.jsonl", *predict, "--allow", "product:Product", cwd=mine)
    with pytest.raises(InputError, match='allow="product:Product"'):
        extremis.load(out)
    with pytest.raises(InputError, match="no module 'product' in"):
        extremis.load(out, allow=["product:Product"])
    (first, *_) = map(json.loads, (tmp_path / "p.jsonl").read_text().splitlines())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(mine)
        model = extremis.load(out, allow=["product:Product"])
    explained = model.explain("a ship in a storm", first["labels"][0])
    assert explained.parts.keys() == {"vector", "text"}


def test_a_run_that_is_stopped_and_resumed_is_the_run_that_never_was(mine: Path, tmp_path: Path) -> None:
    data = build_data(str(tmp_path / "data"), rows={"train": 100}).layout.root
    recipe = load_recipe(str(mine / "spread.toml"), [*TINY, *MORE])
    plain = load_recipe(str(mine / "spread.toml"), [*TINY, *MORE, "spread.weight=0"])
    losses = train(Trainer.start(data, str(tmp_path / "straight"), recipe, silent))
    assert losses != train(Trainer.start(data, str(tmp_path / "plain"), plain, silent))
    assert assert_resumes(data, str(tmp_path / "stopped"), recipe, losses, 2 * len(losses) // 3)


def train_on(group: Group, source: str, data: str, run: str) -> list[float]:
    return train(Trainer.start(data, run, load_recipe(source, [*TINY, *MORE, "spread.weight=0.5"]), silent, group))


@pytest.mark.slow
def test_two_ranks_read_the_same_module(mine: Path, tmp_path: Path) -> None:
    data = build_data(str(tmp_path / "data"), rows={"train": 100}).layout.root
    one, two = on_ranks(2, train_on, str(mine / "spread.toml"), data, str(tmp_path / "run"))
    assert one == two
    assert load_config(RunLayout(str(tmp_path / "run")).config)["modules"].keys() == {"spread:Spread"}


def refused_on(group: Group, sources: list[str], data: str, run: str) -> str:
    with pytest.raises(InputError) as error:
        train_on(group, sources[group.rank], data, run)
    return str(error.value)


def test_ranks_with_different_modules_are_refused(tmp_path: Path) -> None:
    data = build_data(str(tmp_path / "data"), rows={"train": 100}).layout.root
    sources = []
    for name in ("here", "there"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "differing.py").write_text((EXAMPLES / "spread.py").read_text() + f"# {name}\n")
        (folder / "own.toml").write_text('extends = "astra"\nmethod = "differing:Spread"\n')
        sources.append(str(folder / "own.toml"))
    for message in on_ranks(2, refused_on, sources, data, str(tmp_path / "run")):
        assert "rank 1 of 2: this rank has Extremis" in message
        assert "differing:Spread" in message
