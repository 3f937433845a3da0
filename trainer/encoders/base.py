"""What every encoder is: inputs to x [B, D], its optimizer and files; sums of its gradients over ranks."""

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from schemas.layout import DataLayout
from schemas.randomness import Purpose
from schemas.sizes import batch_by_size
from trainer.device import CPU, torch_generator
from trainer.encoders.bag import WEIGHTS
from trainer.group import ALONE, Group
from trainer.inputs import Inputs
from trainer.methods.kinds import EncoderSection

_BUCKET_BYTES = 1 << 25


class GradientExchange:
    """Sums gradients of `parameters` over the ranks of `group`: run one or more backward passes, then call `finish`.

    Buckets are filled from the last parameter to the first, in the order of a backward pass. A full bucket is sent as
    soon as the previous bucket has been sent. At the end of the pass, the remaining buckets are sent. Every rank
    therefore sends the same buckets in the same order, whatever part of the batch the rank has.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], group: Group) -> None:
        self.group = group
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._expected = [True] * len(self._parameters)  # False: no gradient on any rank last time
        self._buckets: list[list[int]] = []
        self._missing: list[int] = []  # by bucket
        self._sums: list[Callable[[], torch.Tensor]] = []  # each waits for its bucket's sum

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Send gradients during the backward pass that the block runs, if any. Raises RankLostError."""
        expected = (n for n in reversed(range(len(self._parameters))) if self._expected[n])
        self._buckets = list(batch_by_size(expected, lambda n: self._parameters[n].nbytes, _BUCKET_BYTES))
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sums = []
        hooks = [
            self._parameters[n].register_post_accumulate_grad_hook(functools.partial(self._count_gradient, number))
            for number, bucket in enumerate(self._buckets)
            for n in bucket
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        while len(self._sums) < len(self._buckets):
            self._send()

    def finish(self) -> None:
        """Replace gradients with their sums; a parameter without a gradient on any rank gets no gradient.

        Raises RankLostError.
        """
        if not self._parameters:
            return
        if not self._sums:  # gradients of several passes are sent now
            with self.sending():
                pass
        flags = torch.tensor([parameter.grad is not None for parameter in self._parameters], dtype=torch.uint8)
        has_gradient = self.group.max(flags).bool().tolist()
        for bucket, summed in zip(self._buckets, self._sums, strict=True):
            self._unpack(bucket, summed(), has_gradient)
        unexpected = [n for n, expected in enumerate(self._expected) if has_gradient[n] and not expected]
        if unexpected:
            self._unpack(unexpected, self.group.sum(self._pack(unexpected)), has_gradient)
        self._buckets, self._sums, self._expected = [], [], has_gradient

    def _count_gradient(self, number: int, parameter: torch.nn.Parameter) -> None:
        """Count one gradient of bucket `number`, and send the buckets that are complete."""
        self._missing[number] -= 1
        while len(self._sums) < len(self._buckets) and not self._missing[len(self._sums)]:
            self._send()

    def _send(self) -> None:
        self._sums.append(self.group.begin_sum(self._pack(self._buckets[len(self._sums)])))

    def _pack(self, numbers: list[int]) -> torch.Tensor:
        """Concatenate gradients, with zeros for missing gradients."""
        some = [self._parameters[n] for n in numbers]
        return torch.cat([(torch.zeros_like(each) if each.grad is None else each.grad).view(-1) for each in some])

    def _unpack(self, numbers: list[int], flat: torch.Tensor, has_gradient: list[bool]) -> None:
        parts = flat.split([self._parameters[n].numel() for n in numbers])
        for n, part in zip(numbers, parts, strict=True):
            self._parameters[n].grad = part.view_as(self._parameters[n]) if has_gradient[n] else None


Before = Callable[[int], int]


class Size(NamedTuple):
    """Bytes of an encoder's parameters and of the optimizer's state."""

    parameters: int
    state: int


class Encoder(ABC):
    """Maps inputs to x [B, D] float32, with its own parameters, optimizers and files.

    The parameters belong to torch modules and are trained with AdamW; an encoder with other parameters extends the
    methods. Each rank has a full copy of the encoder and encodes a part of the batch; `reduce` and `update` keep all
    copies bitwise equal.
    """

    section: ClassVar[type[EncoderSection]]  # options of this kind of encoder
    device = CPU
    matrices: tuple[Any, ...] = ()  # each RowMatrix that `update` steps on

    def __init__(self, config: EncoderSection, modules: nn.Module, seed: int, lr: float) -> None:
        """Train the parameters of `modules` with learning rate `lr`.

        The constructor of a subclass takes (section, vocabulary, seed, features). If the section's `inputs` includes
        dense vectors, the constructor also takes the length of the vectors as `dense`.
        """
        self.dimension = config.dimension
        self._config, self._modules, self._seed, self._lr = config, modules, seed, lr
        self._exchange: GradientExchange | None = None

    def move(self, device: torch.device) -> None:
        """Move the parameters to a device before the first step; prepared inputs are on the same device."""
        self.device = device
        self._modules.to(device)

    @classmethod
    def size(cls, config: Any, vocabulary: int, dense: int = 0) -> Size:
        """Return the size of an encoder with the options `config`. Raises InputError if the model does not exist.

        By default, `size` builds an encoder and assumes that Adam's state takes twice the bytes of the parameters.
        """
        encoder: Encoder = config.implementation(config, vocabulary, 0)
        parameters = encoder._measure().parameters
        return Size(parameters, 2 * parameters)

    @classmethod
    def least_bytes(cls, config: Any, vocabulary: int, features: int, dense: int = 0) -> int:
        """Return a lower bound on the parameters' bytes, without building an encoder; by default the bytes of D floats.

        `features`: number of sparse features of the data. `dense`: length of the data's dense vectors.
        """
        return 4 * int(config.dimension)

    def begin(self, data: DataLayout) -> None:  # noqa: B027
        """Load pretrained vectors for DATA's tokens before `fit`. Does nothing by default. Raises InputError."""

    def fit(self, rows: Iterable[Inputs], group: Group = ALONE) -> None:  # noqa: B027
        """Compute statistics of the training rows before the first step; does nothing by default.

        Each rank passes its parts of the batches.
        """

    def admit(self, rows: Iterable[Inputs], documents: int) -> None:  # noqa: B027
        """Add the features that first occur in `rows`; `documents`: number of training rows. Does nothing by default.

        The trainer calls `admit` on an encoder from another run, before the first step, with the same `rows` on every
        rank.
        """

    @abstractmethod
    def prepare(self, inputs: Inputs, dropout_key: tuple[int, ...] | None = None, before: Before = ALONE.before) -> Any:
        """Prepare B rows for `encode`, on the encoder's device; only training passes `dropout_key` (epoch, step, ...).

        If the rows are one part of a batch and contain `count` items, `before(count)` returns the number of items in
        earlier parts, so that the rows get the same dropout as in the whole batch. `prepare` may call `before` any
        number of times (`Group.before`).
        """

    @abstractmethod
    def encode(self, inputs: Any, dropout_key: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return x [B, D], with an autograd graph only in training (if `dropout_key` is given).

        The same key always gives the same dropout. In training under `torch.no_grad` there is dropout but no graph.
        """

    def exchanging(self, group: Group) -> contextlib.AbstractContextManager[None]:
        """Sum gradients over ranks while the block runs the only backward pass of a step; `reduce` completes the sums.

        Every rank must enter the block, even without rows. Raises RankLostError.
        """
        return self._exchange_with(group).sending() if group.ranks > 1 else contextlib.nullcontext()

    def reduce(self, group: Group) -> None:
        """Sum the gradients over ranks, before `update`; the result is bitwise the same on every rank.

        If no rank has a gradient for a parameter, the parameter gets no gradient. Raises RankLostError.
        """
        if group.ranks > 1:
            self._exchange_with(group).finish()

    def _exchange_with(self, group: Group) -> GradientExchange:
        if self._exchange is None or self._exchange.group is not group:
            self._exchange = GradientExchange(self._modules.parameters(), group)
        return self._exchange

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        """Return AdamW, built at first use, because building AdamW makes PyTorch load its compiler (150 MiB)."""
        groups = _groups(self._modules, self._config.weight_decay)
        return torch.optim.AdamW(groups, lr=self._lr, fused=True if self.device.type == "cuda" else None)

    def update(self, factor: float, clip: float = 0.0) -> None:
        """Take one optimizer step with the gradients since the last step; `factor` in [0, 1] scales all learning rates.

        With `clip`, gradients are scaled down if their joint norm exceeds `clip`.
        """
        clip_gradients((parameter.grad for parameter in self._modules.parameters()), clip)
        for group in self._optimizer.param_groups:
            group.update(lr=self._lr * factor)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters needed to encode, by name."""
        return {name: value.detach() for name, value in self._modules.named_parameters()}

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's state by name; the state is needed only to continue training."""
        if "_optimizer" not in vars(self):  # before the first step there is no state, so no optimizer is built
            return {}
        return {
            f"{name}.{key}": torch.as_tensor(value)
            for name, parameter in self._modules.named_parameters()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load the tensors that `tensors` returned."""
        for name, parameter in self._modules.named_parameters():
            parameter.copy_(tensors[name])

    def load_optimizer_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load the tensors that `optimizer_tensors` returned."""
        for name, parameter in self._modules.named_parameters():
            # Only a fused AdamW keeps step counts on the device of the parameter.
            places = {"step": CPU if self.device.type != "cuda" else parameter.device}
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{key}" in tensors]
            if keys:
                self._optimizer.state[parameter] = {
                    key: tensors[f"{name}.{key}"].to(places.get(key, parameter.device), copy=True) for key in keys
                }

    def write(self, folder: Path, tokens: int) -> None:
        """Write the parameters to the empty `folder`; `tokens`: maximum number of tokens per text."""
        save_file({name: value.cpu().contiguous() for name, value in self.tensors().items()}, folder / WEIGHTS)

    def load(self, folder: Path) -> None:
        """Read the files that `write` wrote; `config.at_folder(folder)` built this encoder."""
        self.load_tensors(load_file(folder / WEIGHTS))

    def _draw_kept(self, rows: int, dropout_key: tuple[int, ...] | None, first: int = 0) -> torch.Tensor | None:
        """Draw the elements of x [b, D] that dropout keeps, as bool on the host; None if dropout keeps all elements.

        The rows are rows [first, first + b) of a batch, and get the same dropout as in the whole batch. `prepare` draws
        the elements, possibly ahead of the step.
        """
        if dropout_key is None or not self._config.dropout:
            return None
        draw = torch_generator(self._seed, Purpose.DROPOUT, *dropout_key)
        return torch.rand((first + rows, self.dimension), generator=draw)[first:] >= self._config.dropout

    def _finish(self, x: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the final operations to x [b, D]: unit norm, scale, and dropout that keeps the elements `kept`."""
        if self._config.normalize:
            x = torch.nn.functional.normalize(x, dim=1)
        if self._config.scale != 1.0:
            x = x * self._config.scale
        return x if kept is None else x * kept / (1 - self._config.dropout)

    def _measure(self) -> Size:
        """Return the bytes of the existing tensors."""
        return Size(tensor_bytes(self.tensors().values()), tensor_bytes(self.optimizer_tensors().values()))


def _groups(modules: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into two groups: with weight decay, and without (biases and norms, which are vectors)."""
    parameters = list(modules.parameters())  # may be empty
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Count the bytes of `tensors`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def clip_gradients(gradients: Iterable[torch.Tensor | None], limit: float) -> None:
    """Scale gradients so that their joint norm is at most `limit`; 0 means no limit."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not limit or not present:
        return
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in present]))
    torch._foreach_mul_(present, (limit / norm).clamp(max=1.0))
