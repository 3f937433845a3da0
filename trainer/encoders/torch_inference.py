"""Runs an export's encoder with PyTorch, for encoders that no lighter library can run."""

from pathlib import Path

import numpy as np
import torch

from schemas.mapped import MapFile
from trainer.device import open_device
from trainer.encoders.base import Encoder
from trainer.input_kinds import input_names
from trainer.inputs import Inputs
from trainer.methods.kinds import EncoderSection, Sizes


class TorchInference:
    """An encoder on a device, with arrays as input and output."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    @classmethod
    def open(
        cls, section: EncoderSection, folder: Path, map_file: MapFile, sizes: Sizes, device: str
    ) -> "TorchInference":
        """Open the files that `Encoder.write` wrote to `folder`. Raises InputError if the device does not exist."""
        vocabulary, features, dense = sizes
        read = {"dense": dense} if "dense" in input_names(section.inputs) else {}
        encoder: Encoder = section.at_folder(str(folder)).build(vocabulary, 0, features, **read)
        encoder.load(folder)
        encoder.move(open_device(device))
        return cls(encoder)

    @torch.no_grad()
    def embed(self, inputs: Inputs) -> np.ndarray:
        """Return x float32 [B, D]."""
        return self._encoder.encode(self._encoder.prepare(inputs)).float().cpu().numpy()
