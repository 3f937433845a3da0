"""`--device`: a GPU that is not there is one message, and what is computed elsewhere is the same run."""

from pathlib import Path

import pytest
import torch

from schemas.layout import RunLayout
from tests.builders import SmallData, build_data
from tests.command import call, refused, sets
from trainer.device import open_device
from trainer.recipe_files import load_config

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("device") / "data"))


@pytest.fixture(scope="module")
def run(small: SmallData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("device") / "run"
    done = call("train", "random", small.layout.root, run, *sets("train.epochs=1", "order.batch=16"), "--device", "cpu")
    assert done.status == 0, done.err
    assert "device: cpu" in done.err
    return run


def test_the_device_is_recorded(run: Path) -> None:
    layout = RunLayout(str(run))
    assert load_config(layout.config)["recipe"]["train"]["device"] == "cpu"
    assert '"device": "cpu"' in (run / "metrics.jsonl").read_text()


def test_a_run_goes_on_elsewhere(run: Path, small: SmallData) -> None:
    arguments = sets("train.epochs=1", "order.batch=16")
    done = call("train", "random", small.layout.root, run, *arguments, "--device", "auto", "--resume")
    assert done.status == 0, done.err


@without_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(name: str, small: SmallData, run: Path, tmp_path: Path) -> None:
    data, new = small.layout.root, tmp_path / "new"
    refused(call("train", "random", data, new, *sets(), "--device", name), name, "'auto'")
    assert not new.exists()
    refused(call("evaluate", data, run, "--device", name), name, "'auto'")
    refused(call("embed", data, run, tmp_path / "out", "--device", name), name, "'auto'")
    refused(call("export", data, run, tmp_path / "exported", "--device", name), name, "'auto'")
    refused(call("fuse", data, run, "--split", "test", "--device", name), name, "'auto'")
    refused(call("run", "auto", data, new, "--device", name), name, "'auto'")
    assert not (new / "trials").exists()
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "exported").exists()


def test_a_name_of_no_device_is_refused(small: SmallData, tmp_path: Path) -> None:
    for name in ("gpu", "cuda:", "cuda:x", "mps"):
        refused(call("train", "random", small.layout.root, tmp_path / "new", "--device", name), name, "cuda:1")
        done = call("train", "random", small.layout.root, tmp_path / "new", *sets(f"train.device={name}"))
        refused(done, "train.device", name)


@without_gpu
def test_auto_is_the_cpu_where_there_is_nothing_else() -> None:
    assert open_device("auto") == open_device("cpu") == torch.device("cpu")


@pytest.mark.gpu
def test_auto_is_the_gpu_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert open_device("auto") == torch.device("cuda", 0)
