"""A mode under which operations over two devices raise, and a model on PyTorch's `meta` device, which has no values.

On `meta`, what reads a value back raises by itself (`.item()`, `.cpu()`, `.numpy()`, `nonzero`): so a step that gets
through has left no tensor on the host, and waits for no device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.group import ALONE
from trainer.heads import FrozenQueries
from trainer.methods.recipe import Recipe
from trainer.model import DataSizes, Model, open_texts
from trainer.negatives.base import NegativeSources, Sampled
from trainer.negatives.indexes import FreshIndex
from trainer.setup import open_negative_sources, open_planner, open_query_embeddings, open_stream
from trainer.step import Clock, StepContext, plan_for_device, take_step
from trainer.stream import Batch, open_sources

META = torch.device("meta")
STEPS = 2


class OneDevice(TorchDispatchMode):
    """Refuse every operation whose tensors, those without a dimension apart, are on two devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        devices = {str(tensor.device) for tensor in tensors}
        assert len(devices) <= 1, f"{func} has tensors on {' and '.join(sorted(devices))}"
        return func(*args, **(kwargs or {}))


class HostSources(NegativeSources):
    """Sources that search on the host, over vectors of their own there: they see other embeddings than the step's."""

    def find(self, batch: Batch, x: torch.Tensor) -> list[Sampled]:
        return super().find(batch, torch.randn(x.shape, generator=torch.Generator().manual_seed(batch.step)))


def step_on_meta(
    data: Any,
    recipe: Recipe,
    change: Callable[[StepContext], None] = lambda context: None,
    rows: torch.device = META,
    ahead: bool = False,
) -> None:
    """Take STEPS steps of `recipe` on DATA, planned on the host as ever; `change` spoils their parts first.

    rows: where the head's rows are to be found in the end. `ahead`: batches are planned and prepared for the device.
    """
    facts, group = DataSizes.of(data), ALONE
    tables = open_sources(data, recipe.data.split, recipe.data.label_texts, recipe.encoder.inputs)

    def build(device: torch.device) -> Model:
        texts = open_texts(data, recipe)
        return Model.build(
            recipe, facts.vocabulary, facts.labels, facts.features, group, texts, device, dense=facts.dense
        )

    model, host = build(META), build(torch.device("cpu"))
    planner = open_planner(recipe, data, facts.labels, group, lambda line: None, META)
    clock = Clock()
    queries = open_query_embeddings(recipe, model, group, clock)
    plan, prepare = partial(plan_for_device, planner, META), queries.preparing()
    if not ahead:
        plan, prepare = planner if model.head.has_rows else None, None
    stream = open_stream(recipe, tables, facts.labels, group, plan, prepare)
    batches = [batch for batch, _ in zip(stream, range(STEPS), strict=False)]
    queries.begin(tables)
    if isinstance(queries, FrozenQueries):  # as after its first epoch: what it encodes in it goes to a file
        host_queries = FrozenQueries(host.encoder)
        host_queries.begin(tables)
        for batch in batches:
            host_queries.embed(batch, 0)
        queries._x, queries._encoded = host_queries._x, host_queries._encoded
    sources = open_negative_sources(recipe, model, group)
    if not all(isinstance(source, FreshIndex) and source._on_device for source in sources):
        sources = HostSources(open_negative_sources(recipe, host, group))
    context = StepContext(model, planner, queries, group, sources, clock, clip=1.0)
    change(context)
    with OneDevice():
        for number, batch in enumerate(batches):
            result = take_step(context, batch, number, 0.5)
            assert result.loss.device == result.x.device == META
    encoder = {name: tensor for name, tensor in model.encoder.tensors().items() if name != "feature_weights"}
    assert {tensor.device for tensor in encoder.values()} <= {META}
    assert {tensor.device for tensor in model.head.rows().values()} <= {rows}
