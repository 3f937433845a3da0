"""The layout of sentence-transformers: modules.json, and a folder for each step after the model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trainer.encoders.base import WEIGHTS
from trainer.methods.kinds import EncoderSection

_BOTTLENECK = "bottleneck"
_MODULE = "sentence_transformers.models."
_POOLING = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


def write_modules(
    folder: Path, config: EncoderSection, hidden: int, pooling: str, bottleneck: nn.Linear | None, tokens: int
) -> None:
    """Write the steps after a model of `hidden` dimensions: pooling, bottleneck, unit norm and scale.

    Texts are cut after `tokens` tokens.
    """
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{_MODULE}Transformer"}]

    def add(name: str, kind: str, body: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        path = f"{len(modules)}_{kind}"
        modules.append({"idx": len(modules), "name": name, "path": path, "type": f"{_MODULE}{kind}"})
        (folder / path).mkdir()
        _write_json(folder / path / "config.json", body)
        if tensors:
            save_file({key: value.detach().contiguous() for key, value in tensors.items()}, folder / path / WEIGHTS)

    modes = {mode: name == pooling for name, mode in _POOLING.items()}
    add("pooling", "Pooling", {"word_embedding_dimension": hidden, **modes})
    if bottleneck is not None:
        weights = {f"linear.{name}": value for name, value in bottleneck.state_dict().items()}
        add(_BOTTLENECK, "Dense", _describe_dense(hidden, config.dimension, bias=True), weights)
    if config.normalize:
        add("normalize", "Normalize", {})
    if config.scale != 1.0:  # there is no module for a factor
        square = _describe_dense(config.dimension, config.dimension, bias=False)
        add("scale", "Dense", square, {"linear.weight": config.scale * torch.eye(config.dimension)})
    _write_json(folder / "modules.json", modules)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": tokens, "do_lower_case": False})
    # Its own classes choose their similarity; vectors here are scored by inner product.
    _write_json(folder / "config_sentence_transformers.json", {"prompts": {}, "similarity_fn_name": "dot"})


def read_bottleneck(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weight and the bias of the bottleneck that `write_modules` wrote."""
    modules = json.loads((folder / "modules.json").read_text())
    (path,) = [module["path"] for module in modules if module["name"] == _BOTTLENECK]
    return {name.removeprefix("linear."): value for name, value in load_file(folder / path / WEIGHTS).items()}


def _describe_dense(inputs: int, outputs: int, bias: bool) -> dict[str, Any]:
    return {
        "in_features": inputs,
        "out_features": outputs,
        "bias": bias,
        "activation_function": "torch.nn.modules.linear.Identity",
    }


def _write_json(path: Path, body: Any) -> None:
    path.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
