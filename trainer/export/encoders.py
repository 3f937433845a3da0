"""The encoder as a directory: in sentence-transformers' layout for a transformer, as safetensors for a bag."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trainer.config import Encoder as EncoderConfig
from trainer.encoders import Encoder
from trainer.encoders.transformer import TransformerEncoder

WEIGHTS = "model.safetensors"
_BOTTLENECK = "bottleneck"
_MODULE = "sentence_transformers.models."
_POOLING = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


def write_encoder(encoder: Encoder, config: EncoderConfig, tokens: int, folder: Path) -> None:
    """Write `encoder`, built by `config`, to the empty `folder`; texts are cut after `tokens` tokens.

    A transformer becomes what `SentenceTransformer(folder)` and `AutoModel.from_pretrained(folder)` open; the former
    gives x as training does, dropout apart. The tokenizer's files are not among what is written here.
    """
    if isinstance(encoder, TransformerEncoder):
        encoder.model.save_pretrained(folder)
        _write_modules(encoder, config, tokens, folder)
    else:
        save_file({name: value.contiguous() for name, value in encoder.tensors().items()}, folder / WEIGHTS)


def load_encoder(encoder: Encoder, folder: Path) -> None:
    """Set the parameters of a freshly built `encoder` to those at `folder`; a transformer has read its model there."""
    if not isinstance(encoder, TransformerEncoder):
        encoder.load_tensors(load_file(folder / WEIGHTS))
    elif encoder.bottleneck is not None:
        (dense,) = [module["path"] for module in _modules_at(folder) if module["name"] == _BOTTLENECK]
        own = {f"{_BOTTLENECK}.{n.removeprefix('linear.')}": v for n, v in load_file(folder / dense / WEIGHTS).items()}
        encoder.load_tensors({**encoder.tensors(), **own})


def _write_modules(encoder: TransformerEncoder, config: EncoderConfig, tokens: int, folder: Path) -> None:
    """modules.json and a folder for every step after the model, in the order of `TransformerEncoder`."""
    hidden = int(encoder.model.config.hidden_size)
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{_MODULE}Transformer"}]

    def add(name: str, kind: str, body: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        place = f"{len(modules)}_{kind}"
        modules.append({"idx": len(modules), "name": name, "path": place, "type": f"{_MODULE}{kind}"})
        (folder / place).mkdir()
        _write_json(folder / place / "config.json", body)
        if tensors:
            save_file({key: value.detach().contiguous() for key, value in tensors.items()}, folder / place / WEIGHTS)

    modes = {mode: pooling == config.pooling for pooling, mode in _POOLING.items()}
    add("pooling", "Pooling", {"word_embedding_dimension": hidden, **modes})
    if encoder.bottleneck is not None:
        linear = encoder.bottleneck
        add(
            _BOTTLENECK,
            "Dense",
            _dense(hidden, config.dimension, bias=True),
            {"linear.weight": linear.weight, "linear.bias": linear.bias},
        )
    if config.normalize:
        add("normalize", "Normalize", {})
    if config.scale != 1.0:  # there is no module for a factor
        square = _dense(config.dimension, config.dimension, bias=False)
        add("scale", "Dense", square, {"linear.weight": config.scale * torch.eye(config.dimension)})
    _write_json(folder / "modules.json", modules)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": tokens, "do_lower_case": False})
    # Its own classes choose their similarity; vectors here are scored by inner product.
    _write_json(folder / "config_sentence_transformers.json", {"prompts": {}, "similarity_fn_name": "dot"})


def _dense(inputs: int, outputs: int, bias: bool) -> dict[str, Any]:
    return {
        "in_features": inputs,
        "out_features": outputs,
        "bias": bias,
        "activation_function": "torch.nn.modules.linear.Identity",
    }


def _modules_at(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "modules.json").read_text())
    return found


def _write_json(path: Path, body: Any) -> None:
    path.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
