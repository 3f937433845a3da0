"""Encoders that are one torch module, every parameter of it trained with AdamW."""

import torch
from torch import nn

from trainer.config.encoder import EncoderSection
from trainer.encoders.base import Encoder, clip_gradients, reduce_parameters
from trainer.group import Group


class ModuleEncoder(Encoder):
    """Base of such encoders: a subclass builds the module, prepares rows and encodes them."""

    def __init__(self, config: EncoderSection, modules: nn.Module) -> None:
        self._config, self._modules, self.dimension = config, modules, config.dimension
        self._optimizer = torch.optim.AdamW(modules.parameters(), lr=config.lr, weight_decay=config.weight_decay)

    def reduce(self, group: Group) -> None:
        reduce_parameters(self._modules.parameters(), group)

    def update(self, factor: float, clip: float = 0.0) -> None:
        clip_gradients((parameter.grad for parameter in self._modules.parameters()), clip)
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.lr * factor
        self._optimizer.step()
        self._optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value.detach() for name, value in self._modules.named_parameters()}

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        named = {}
        for name, parameter in self._modules.named_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                named[f"{name}.{key}"] = torch.as_tensor(value)
        return named

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._modules.named_parameters():
                parameter.copy_(tensors[name])

    def load_optimizer_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._modules.named_parameters():
            saved = {
                key: tensors[f"{name}.{key}"].clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{name}.{key}" in tensors
            }
            if saved:
                self._optimizer.state[parameter] = saved
