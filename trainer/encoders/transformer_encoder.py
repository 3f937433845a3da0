"""A Hugging Face model as an encoder, in the sentence-transformers layout: pooling, bottleneck, dropout, unit norm."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from schemas.errors import InputError, failure_of_hub
from schemas.randomness import InitialWeights, Purpose, torch_seed
from trainer.device import CPU, autocast, send, torch_generator
from trainer.encoders.base import WEIGHTS, Before, Encoder
from trainer.group import ALONE
from trainer.inputs import Inputs
from trainer.methods.kinds import EncoderSection, TransformerSection
from trainer.stream.batch import pad_rows

_BOTTLENECK = "bottleneck"
_MODULE = "sentence_transformers.models."
# Kinds of pooling as all versions of sentence-transformers write them, in the order in which kinds are concatenated.
MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


@dataclass(frozen=True)
class PaddedInputs:
    """`input_ids` [B, T] int64, padded to the length of the batch's longest row, and `mask` [B, T] bool.

    `first`: number of rows in earlier parts of the batch. `kept` [B, D] bool: the elements of x that dropout keeps.
    """

    input_ids: torch.Tensor
    mask: torch.Tensor
    first: int = 0
    kept: torch.Tensor | None = None


class TransformerEncoder(Encoder):
    """x = dropout(bottleneck(pool(model(tokens)))); every parameter is trained with AdamW."""

    _config: TransformerSection

    def __init__(self, config: TransformerSection, vocabulary: int, seed: int, features: int = 0) -> None:
        self._model = load_model(config.model, f"encoder.model = {config.model!r}")
        hidden = int(self._model.config.hidden_size)
        if not config.bottleneck and config.dimension != hidden:
            raise InputError(
                f"encoder.dimension = {config.dimension}, but {config.model} has {hidden} dimensions: set "
                f"encoder.dimension = {hidden}, or encoder.bottleneck = true to project to {config.dimension}."
            )
        modules = nn.ModuleDict({"model": self._model})
        self._bottleneck = nn.Linear(hidden, config.dimension) if config.bottleneck else None
        if self._bottleneck is not None:
            draw = torch_generator(seed, Purpose.INITIAL_WEIGHTS, InitialWeights.DENSE)
            with torch.no_grad():
                self._bottleneck.weight.normal_(0, hidden**-0.5, generator=draw)
                self._bottleneck.bias.zero_()
            modules["bottleneck"] = self._bottleneck
        if config.compile:
            # Batches differ in length, and a second pass over the same rows must repeat the dropout of the first pass.
            self._model.compile(dynamic=True, options={"fallback_random": True})
        # The pooler gets no gradient and does not change, because pooling by mean or [CLS] never calls the pooler.
        super().__init__(config, modules, seed, config.lr)

    @property
    def model(self) -> Any:
        """The Hugging Face model."""
        return self._model

    def prepare(
        self, inputs: Inputs, dropout_key: tuple[int, ...] | None = None, before: Before = ALONE.before
    ) -> PaddedInputs:
        assert inputs.tokens is not None, "a transformer reads tokens"
        padded = pad_rows(inputs.tokens, most=self._config.max_tokens)
        # An empty row attends to one pad.
        mask = padded._replace(lengths=padded.lengths.clamp(min=1)).attention_mask
        if dropout_key is None:
            return send(PaddedInputs(padded.input_ids, mask), self.device)
        first = before(len(mask))
        kept = self._draw_kept(len(mask), dropout_key, first)
        return send(PaddedInputs(padded.input_ids, mask, first, kept), self.device)

    def encode(self, inputs: PaddedInputs, dropout_key: tuple[int, ...] | None = None) -> torch.Tensor:
        if dropout_key is None:
            self._modules.eval()
            with torch.no_grad():
                return self._finish(self._embed(inputs))
        self._modules.train()
        # The model's own dropout uses torch's global generator, which is seeded for the step and restored afterwards.
        # Dropout masks have the shape of padded batches, so a part of a batch does not get a part of the batch's masks.
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(torch_seed(self._seed, Purpose.MODEL_DROPOUT, *(*dropout_key, inputs.first)[:3]))
            x = self._embed(inputs)
        return self._finish(x, inputs.kept)

    def write(self, folder: Path, tokens: int) -> None:
        """Write files for `SentenceTransformer(folder)` and `AutoModel.from_pretrained(folder)`.

        `SentenceTransformer` computes x as in training, but without dropout. `write` does not write the tokenizer.
        """
        self._model.save_pretrained(folder)
        hidden = int(self._model.config.hidden_size)
        write_modules(folder, self._config, hidden, self._config.pooling, self._bottleneck, tokens)

    def load(self, folder: Path) -> None:
        """Read the bottleneck, if there is one; the constructor has already read the model from `folder`."""
        if self._bottleneck is not None:
            modules = json.loads((folder / "modules.json").read_text())
            (path,) = [module["path"] for module in modules if module["name"] == _BOTTLENECK]
            tensors = load_file(folder / path / WEIGHTS)
            self._bottleneck.load_state_dict({name.removeprefix("linear."): value for name, value in tensors.items()})

    @property
    def _takes_whole_masks(self) -> bool:
        """Return whether the model on a GPU accepts a mask [B, 1, 1, T] unchanged, as recent Transformers models do."""
        bidirectional = "create_bidirectional_mask" in vars(sys.modules[type(self._model).__module__])
        return self.device != CPU and bidirectional and self._model.config._attn_implementation == "sdpa"

    def _embed(self, inputs: PaddedInputs) -> torch.Tensor:
        if not inputs.input_ids.shape[0]:  # an empty part of a batch, which the model may refuse
            return torch.empty(0, self.dimension, device=self.device, requires_grad=True)
        precision = self._config.precision
        narrow = precision == "bfloat16" or (precision == "auto" and self.device.type == "cuda")
        with autocast(self.device, torch.bfloat16 if narrow else None):
            # With a mask [B, T], the model may check whether all elements are true, and wait for the device.
            mask = inputs.mask[:, None, None] if self._takes_whole_masks else inputs.mask.long()
            states = self._model(input_ids=inputs.input_ids, attention_mask=mask).last_hidden_state
        x = pool(states.float(), inputs.mask, [self._config.pooling])
        return x if self._bottleneck is None else self._bottleneck(x)  # type: ignore[no-any-return]


def pool(states: torch.Tensor, mask: torch.Tensor, modes: Sequence[str], skip: int = 0) -> torch.Tensor:
    """Pool the `states` [B, T, D] of rows padded on the right, with `mask` [B, T] bool, to [B, D × modes].

    `skip`: number of leading tokens (a prompt) that every mode except `lasttoken` ignores.
    """
    # Not len(mask), which an exported graph could treat as a constant.
    first = torch.zeros(mask.shape[0], dtype=torch.int64, device=mask.device)
    lengths = mask.sum(1)
    if skip:
        first = torch.where(lengths > skip, skip, first)
        mask = mask & (torch.arange(mask.shape[1], device=mask.device) >= skip)
    rows = torch.arange(mask.shape[0], device=mask.device)
    present = mask.unsqueeze(2).to(states.dtype)
    pooled = []
    for mode in modes:
        if mode == "cls":
            x = states[rows, first] if skip else states[:, 0]
        elif mode == "lasttoken":
            x = states[rows, lengths - 1]
        elif mode == "max":
            x = states.masked_fill(present == 0, -torch.inf).max(1).values
        else:
            weight = present
            if mode == "weightedmean":
                weight = present * torch.arange(1, mask.shape[1] + 1, device=mask.device)[:, None]
            total = weight.sum(1)
            total = total.clamp(min=1e-9) if skip else total  # a row may be no longer than its prompt
            x = (states * weight).sum(1) / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)
        pooled.append(x)
    return torch.cat(pooled, 1) if len(pooled) > 1 else pooled[0]


def write_modules(
    folder: Path, config: EncoderSection, hidden: int, pooling: str, bottleneck: nn.Linear | None, tokens: int
) -> None:
    """Write the modules that follow a model with `hidden` dimensions: pooling, bottleneck, unit norm and scale.

    Texts are truncated to `tokens` tokens.
    """
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{_MODULE}Transformer"}]

    def add(name: str, kind: str, body: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        path = f"{len(modules)}_{kind}"
        modules.append({"idx": len(modules), "name": name, "path": path, "type": f"{_MODULE}{kind}"})
        (folder / path).mkdir()
        _write_json(folder / path / "config.json", body)
        if tensors:
            save_file({key: value.detach().contiguous() for key, value in tensors.items()}, folder / path / WEIGHTS)

    def add_dense(name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        outputs, inputs = tensors["linear.weight"].shape
        shape = {"in_features": inputs, "out_features": outputs, "bias": "linear.bias" in tensors}
        add(name, "Dense", {**shape, "activation_function": "torch.nn.modules.linear.Identity"}, tensors)

    modes = {MODES[name]: name == pooling for name in ("mean", "cls")}
    add("pooling", "Pooling", {"word_embedding_dimension": hidden, **modes})
    if bottleneck is not None:
        add_dense(_BOTTLENECK, {f"linear.{name}": value for name, value in bottleneck.state_dict().items()})
    if config.normalize:
        add("normalize", "Normalize", {})
    if config.scale != 1.0:  # sentence-transformers has no module for a factor
        add_dense("scale", {"linear.weight": config.scale * torch.eye(config.dimension)})
    _write_json(folder / "modules.json", modules)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": tokens, "do_lower_case": False})
    # The similarity is stated, because vectors here are scored by inner product.
    _write_json(folder / "config_sentence_transformers.json", {"prompts": {}, "similarity_fn_name": "dot"})


def _write_json(path: Path, body: Any) -> None:
    path.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")


def load_model(name: str, what: str) -> Any:
    """Load the Hugging Face model `name`, or an encoder-decoder's encoder. Raises an InputError that names `what`."""
    from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        kind: Any = AutoModelForTextEncoding if config.is_encoder_decoder else AutoModel
        options = {"trust_remote_code": False, "use_safetensors": True, "output_loading_info": True}
        model, found = kind.from_pretrained(name, **options)  # nothing is unpickled
        if missing := sorted(key for key in found["missing_keys"] if "pooler." not in key):  # heads have no pooler
            named = ", ".join([*missing[:3], *["…"] * (len(missing) > 3)])
            raise ValueError(f"the weights lack {len(missing)} of the model's tensors: {named}.")
    except (OSError, ValueError) as error:
        raise failure_of_hub(error)(
            f"cannot load {what}: {str(error).splitlines()[0]} Give a directory with config.json and "
            "model.safetensors, or a hub name that this machine can reach."
        ) from error
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()  # parameters are in the mapped file, which another process may change or cut
    return model
