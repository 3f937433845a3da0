"""Interface of an encoder for training, export and sizing."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from schemas.layout import DataLayout
from schemas.randomness import Purpose
from trainer.device import CPU, torch_generator
from trainer.encoders.bag import WEIGHTS
from trainer.encoders.gradient_exchange import GradientExchange
from trainer.group import ALONE, Group
from trainer.inputs import Inputs
from trainer.methods.kinds import EncoderSection

Before = Callable[[int], int]


class Size(NamedTuple):
    """Bytes of parameters, and of their optimizer's state."""

    parameters: int
    state: int


class Encoder(ABC):
    """Inputs to x [B, D] float32, with its own parameters, optimizers and files.

    Its parameters are those of torch modules, trained with AdamW; an encoder with other parameters extends these
    methods. Each rank has a whole one and encodes parts of the batch; all stay the same, to the bit, by `reduce` and
    `update`.
    """

    section: ClassVar[type[EncoderSection]]  # options of this kind
    can_pad: ClassVar[bool] = False  # True: it `pads`, and its part of a step can be recorded (trainer.graph)
    device = CPU
    pads = False  # True: what is prepared for training is padded to few sizes, which changes no number

    def __init__(self, config: EncoderSection, modules: nn.Module, seed: int, lr: float) -> None:
        """Train the parameters of `modules` at `lr`. A subclass is built by (section, vocabulary, seed, features).

        If the section's `inputs` read dense vectors, also by their length: dense=d.
        """
        self.dimension = config.dimension
        self._config, self._modules, self._seed, self._lr = config, modules, seed, lr
        self._exchange: GradientExchange | None = None

    def move(self, device: torch.device) -> None:
        """Move the parameters, before the first step; prepared inputs go to the same device."""
        self.device = device
        self._modules.to(device)

    @classmethod
    def size(cls, config: Any, vocabulary: int, dense: int = 0) -> Size:
        """Return the bytes of such an encoder. Raises InputError: a model that is not there.

        By default it builds one, and Adam's state is twice its parameters.
        """
        encoder: Encoder = config.implementation(config, vocabulary, 0)
        parameters = encoder._measure().parameters
        return Size(parameters, 2 * parameters)

    @classmethod
    def least_bytes(cls, config: Any, vocabulary: int, features: int, dense: int = 0) -> int:
        """Return a lower bound of the parameters' bytes, by arithmetic; at least one column of a matrix.

        `features`: number of sparse features of the data. `dense`: numbers of its dense vectors.
        """
        return 4 * int(config.dimension)

    def begin(self, data: DataLayout) -> None:  # noqa: B027
        """Use a pretrained model's vectors of DATA's tokens, before `fit`; by default nothing. Raises InputError."""

    def fit(self, rows: Iterable[Inputs], group: Group = ALONE) -> None:  # noqa: B027
        """Learn statistics of the training rows before the first step; by default none.

        Each rank brings its parts of the batches.
        """

    def admit(self, rows: Iterable[Inputs], documents: int) -> None:  # noqa: B027
        """Take in features of `rows`, which are new among so many training rows; by default nothing.

        For an encoder from another run, before the first step; the same `rows` on every rank.
        """

    @abstractmethod
    def prepare(self, inputs: Inputs, dropout_key: tuple[int, ...] | None = None, before: Before = ALONE.before) -> Any:
        """Prepare B rows for `encode`, on its device; `dropout_key` (epoch, step, ...) only in training.

        `before(count)`: for rows that are part of a batch and have `count` items, the number of items in earlier parts;
        dropout then equals that of the whole batch. It may be called any number of times (`Group.before`).
        """

    @abstractmethod
    def encode(self, inputs: Any, dropout_key: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return x [B, D], with a graph only in training (`dropout_key` given).

        Equal keys draw equal dropout. In training under `torch.no_grad` there is dropout but no graph.
        """

    def exchanging(self, group: Group) -> contextlib.AbstractContextManager[None]:
        """Sum gradients over ranks while the block makes the only backward pass of a step; `reduce` ends it.

        Every rank makes it, with rows or without. Raises RankLostError.
        """
        return self._exchange_with(group).sending() if group.ranks > 1 else contextlib.nullcontext()

    def reduce(self, group: Group) -> None:
        """Sum the gradients over ranks, before `update`; the same bits on every rank.

        A parameter that no rank has a gradient for keeps none. Raises RankLostError.
        """
        if group.ranks > 1:
            self._exchange_with(group).finish()

    def _exchange_with(self, group: Group) -> GradientExchange:
        if self._exchange is None or self._exchange.group is not group:
            self._exchange = GradientExchange(self._modules.parameters(), group)
        return self._exchange

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        """AdamW, built when training asks for it: PyTorch loads its compiler with the first, 150 MiB."""
        groups = _groups(self._modules, self._config.weight_decay)
        return torch.optim.AdamW(groups, lr=self._lr, fused=True if self.device.type == "cuda" else None)

    def update(self, factor: float | torch.Tensor, clip: float = 0.0) -> None:
        """Make one optimizer step by the gradients since the last one; `factor` in [0, 1] scales every rate.

        With `clip`, gradients with a larger norm over all of them are scaled down to it. If `can_pad`, the factor of a
        step that may be recorded is a float64 tensor [] on the device.
        """
        clip_gradients((parameter.grad for parameter in self._modules.parameters()), clip)
        rate = self._lr * factor
        if isinstance(rate, torch.Tensor):
            rate = rate.float()
        elif self.device != CPU:  # the same as in a recorded step
            rate = float(np.float32(rate))
        recorded = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        for group in self._optimizer.param_groups:
            group.update(lr=rate, capturable=recorded)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters needed to encode, by name."""
        return {name: value.detach() for name, value in self._modules.named_parameters()}

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's state, needed only to continue training, by name."""
        if "_optimizer" not in vars(self):  # no step was made: nothing is built to say so
            return {}
        return {
            f"{name}.{key}": torch.as_tensor(value)
            for name, parameter in self._modules.named_parameters()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over what `tensors` returned."""
        for name, parameter in self._modules.named_parameters():
            parameter.copy_(tensors[name])

    def load_optimizer_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over what `optimizer_tensors` returned."""
        for name, parameter in self._modules.named_parameters():
            # AdamW counts steps beside the parameter only where it is fused.
            places = {"step": CPU if self.device.type != "cuda" else parameter.device}
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{key}" in tensors]
            if keys:
                self._optimizer.state[parameter] = {
                    key: tensors[f"{name}.{key}"].to(places.get(key, parameter.device), copy=True) for key in keys
                }

    def write(self, folder: Path, tokens: int) -> None:
        """Write the parameters to the empty `folder`; texts are cut after `tokens` tokens."""
        save_file({name: value.cpu().contiguous() for name, value in self.tensors().items()}, folder / WEIGHTS)

    def load(self, folder: Path) -> None:
        """Read what `write` wrote; this encoder was built by `config.at_folder(folder)`."""
        self.load_tensors(load_file(folder / WEIGHTS))

    def _draw_kept(self, rows: int, dropout_key: tuple[int, ...] | None, first: int = 0) -> torch.Tensor | None:
        """Draw which numbers of x [b, D] dropout leaves, bool on the host; None if it leaves all.

        They are rows [first, first + b) of a batch, and are dropped as they would be in it. `prepare` draws, which may
        be ahead of the step.
        """
        if dropout_key is None or not self._config.dropout:
            return None
        draw = torch_generator(self._seed, Purpose.DROPOUT, *dropout_key)
        return torch.rand((first + rows, self.dimension), generator=draw)[first:] >= self._config.dropout

    def _finish(self, x: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the last steps to x [b, D]: unit norm, a factor, dropout in training, which scales `kept` up."""
        if self._config.normalize:
            x = torch.nn.functional.normalize(x, dim=1)
        if self._config.scale != 1.0:
            x = x * self._config.scale
        return x if kept is None else x * kept / (1 - self._config.dropout)

    def _measure(self) -> Size:
        """Return the bytes of the tensors that there are."""
        return Size(tensor_bytes(self.tensors().values()), tensor_bytes(self.optimizer_tensors().values()))


def _groups(modules: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into decaying parameters and others: biases and norms, which are vectors."""
    parameters = list(modules.parameters())  # there may be none
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Count the bytes of `tensors`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def clip_gradients(gradients: Iterable[torch.Tensor | None], limit: float) -> None:
    """Scale gradients so that their norm, taken together, is `limit` at most; 0 is no limit."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not limit or not present:
        return
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in present]))
    torch._foreach_mul_(present, (limit / norm).clamp(max=1.0))
