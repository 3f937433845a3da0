"""A step of every recipe on one device: no tensor is left on the host, and nothing waits for a value."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from schemas.layout import DataLayout
from tests.bert import write_bert
from tests.builders import build_data
from tests.recipes import RECIPES
from tests.trainer.one_device import OneDevice, step_on_meta
from trainer.device import CPU
from trainer.heads import HeadStep
from trainer.methods.recipe import Recipe
from trainer.recipe_files import applicable_overrides, load_recipe, validate
from trainer.step import StepContext

SMALL = {
    "order.batch": 16,
    "order.streams": 4,
    "order.window_groups": 2,
    "order.cluster": 1,
    "order.cluster_doubles_every": 0,
    "encoder.dimension": 8,
    "encoder.buckets": 64,
    "encoder.feature_dropout": 0.2,
    "encoder.dropout": 0.2,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLayout:
    return build_data(str(tmp_path_factory.mktemp("device") / "data")).layout


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_bert(tmp_path_factory.mktemp("bert"), 50)


def small(name: str, **changes: Any) -> Recipe:
    """A recipe of the project, with few dimensions and rows a batch."""
    name = RECIPES[name]
    kept = {key: value for key, value in {**SMALL, **changes}.items() if value is not None}
    return load_recipe(name, applicable_overrides(name, [f"{key}={value}" for key, value in kept.items()]))


METHODS = {
    ("classifier", "all"): {"method": "renee", "negatives": {"chunk": 7}},
    ("classifier", "batch"): {"method": "ngame-m2"},
    ("label-encoder", "all"): {"method": "dexml"},
    ("label-encoder", "batch"): {"method": "dexml", "negatives": {"pool": "batch"}},
}


def combination(head: str, loss: str, pool: str, **sections: Any) -> Recipe:
    vectors = {"classifier": {"bias": True, **sections.get("classifier", {})}} if head == "classifier" else {}
    return validate(
        {
            "order": {"batch": 16, "streams": 4, "window_groups": 2},
            "encoder": {"dimension": 8, "buckets": 64, "residual": True, **sections.get("encoder", {})},
            "loss": {"kind": loss, **sections.get("loss", {})},
            "train": sections.get("train", {}),
            **METHODS.get((head, pool), {"negatives": {"pool": pool, "random": 12}}),
            **vectors,
        },
        "test",
    )


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_of_every_recipe_stays_on_its_device(name: str, data: DataLayout) -> None:
    step_on_meta(data, small(name))


@pytest.mark.parametrize("loss", ["bce", "softmax", "infonce", "decoupled", "softtopk", "triplet"])
@pytest.mark.parametrize(
    ("head", "pools"),
    [("classifier", ("shared", "all")), ("classifier", ("own", "batch")), ("label-encoder", ("all", "batch"))],
)
def test_so_does_every_loss_with_every_head(head: str, pools: tuple[str, str], loss: str, data: DataLayout) -> None:
    pool = pools[loss in ("softmax", "decoupled", "triplet")]
    step_on_meta(data, combination(head, loss, pool))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_so_does_every_optimizer_and_dtype(optimizer: str, dtype: str, data: DataLayout) -> None:
    rows = {"optimizer": optimizer, "dtype": dtype, "weight_decay": 0.1}
    step_on_meta(data, combination("classifier", "bce", "own", classifier=rows, encoder={"optimizer": optimizer}))


class MetaGradient:
    """Gradient on its way to the host, from a device without values."""

    def __init__(self, gradient: torch.Tensor) -> None:
        assert gradient.device.type == "meta"
        self._shape = gradient.shape

    def take(self) -> np.ndarray:
        return np.ones(self._shape, np.float32)


@pytest.mark.parametrize(
    ("loss", "pool", "storage"),
    [
        *(("bce", pool, "host") for pool in ("shared", "own", "all")),
        *(("decoupled", pool, "a directory") for pool in ("shared", "own", "all")),
    ],
)
def test_of_vectors_on_the_host_only_rows_and_gradients_travel(
    loss: str, pool: str, storage: str, data: DataLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("trainer.rows.matrix.AsyncCopy", MetaGradient)
    vectors = {"storage": "host" if storage == "host" else str(tmp_path), "dtype": "bfloat16"}
    step_on_meta(data, combination("classifier", loss, pool, classifier=vectors), rows=CPU)


@pytest.mark.parametrize("loss", ["bce", "decoupled"])
@pytest.mark.parametrize("head", ["classifier", "label-encoder"])
def test_so_does_a_transformer(head: str, loss: str, data: DataLayout, bert: str) -> None:
    encoder = {"kind": "transformer", "model": bert, "dimension": 16, "dropout": 0.1, "bottleneck": True}
    recipe = combination(head, loss, "all")
    step_on_meta(data, validate({**recipe.model_dump(), "encoder": encoder}, "test"))


def test_a_whole_mask_gives_a_transformer_what_one_by_row_does(bert: str) -> None:
    """On a device the mask is [B, 1, 1, T], of which nothing is read back."""
    recipe = combination("classifier", "bce", "all")
    section = {"kind": "transformer", "model": bert, "dimension": 16}
    encoder = validate({**recipe.model_dump(), "encoder": section}, "test").encoder.build(50, 0)
    model = encoder.model.eval()  # type: ignore[attr-defined]
    ids, mask = torch.arange(24).view(3, 8), torch.arange(8) < torch.tensor([[8], [3], [1]])
    by_row = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    whole = model(input_ids=ids, attention_mask=mask[:, None, None]).last_hidden_state
    torch.testing.assert_close(whole[mask], by_row[mask])


def test_negatives_of_fresh_scores_stay_there_too(data: DataLayout) -> None:
    step_on_meta(data, small("astra", **{"negatives.pool": "own", "refresh.source": "in-trainer", "refresh.start": 0}))


def test_so_does_a_step_that_is_prepared_ahead(data: DataLayout) -> None:
    sections: dict[str, Any] = {
        "encoder": {"residual": False, "dropout": 0.1, "weight_decay": 0.1},
        "train": {"clip": 1.0},
        "classifier": {"dtype": "bfloat16"},
    }
    step_on_meta(data, combination("classifier", "bce", "own", **sections), ahead=True)


def test_so_does_a_batch_in_parts(data: DataLayout) -> None:
    step_on_meta(data, combination("classifier", "bce", "own", train={"accumulate": 3}))


def read_back(step: HeadStep, loss: torch.Tensor) -> None:
    loss.item()


def left_behind(step: HeadStep, loss: torch.Tensor) -> None:
    step.x[torch.arange(2)]  # which by itself passes in silence


def embedded(step: HeadStep, loss: torch.Tensor) -> None:
    torch.nn.functional.embedding(torch.arange(2), step.x)


# Each in the recipe of one paper, and what passes in silence by itself in a recipe of each.
QUICK_FAULTS = {
    *(("astra", fault) for fault in (read_back, left_behind, embedded)),
    *((name, left_behind) for name in ("dexml", "ngame", "lns", "mips-s")),
}


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        pytest.param(name, fault, message, marks=() if (name, fault) in QUICK_FAULTS else pytest.mark.slow)
        for name in RECIPES
        for fault, message in ((read_back, "meta"), (left_behind, "cpu and meta"), (embedded, "cpu and meta"))
    ],
)
def test_a_fault_is_caught_in_every_recipe(
    name: str, fault: Callable[[HeadStep, torch.Tensor], None], message: str, data: DataLayout
) -> None:
    def plant(context: StepContext) -> None:
        head = context.model.head
        learn = head.learn

        def faulty(step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
            result = learn(step)
            fault(step, result[0])
            return result

        head.learn = faulty  # type: ignore[method-assign]

    with pytest.raises((RuntimeError, AssertionError), match=message):
        step_on_meta(data, small(name), plant)


def test_the_mode_lets_tensors_without_a_dimension_pass() -> None:
    with OneDevice():
        assert (torch.ones(3, device="meta") * torch.tensor(2.0)).shape == (3,)
        with pytest.raises(AssertionError, match="cpu and meta"):
            torch.ones(3, device="meta").index_select(0, torch.arange(2))
