"""Forms of an encoder in an export: PyTorch, and graphs, which are written here and compared with PyTorch's encoder."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from schemas import PAD
from schemas.errors import InputError, missing_extra, option
from schemas.mapped import MapFile, MappedFile
from schemas.ragged import Ragged
from scoring.exported import Embedder, Serving, forms_of
from trainer.device import open_device
from trainer.encoders.bag import unit
from trainer.encoders.base import Encoder
from trainer.encoders.transformer_encoder import PaddedInputs, TransformerEncoder
from trainer.input_kinds import input_names
from trainer.inputs import Inputs
from trainer.methods.kinds import EncoderSection, Sizes, import_name


class TorchInference:
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


AUTO_FORM = "auto"
_INT8 = "onnx-int8"
_MAX_DIFFERENCE = 1e-4  # largest float32 difference of x, as a fraction of the largest absolute value
_MIN_COSINE = 0.9  # least mean cosine of int8 with float32
_DEPTH = 5  # number of labels per query that are compared


def choose_form(stated: str, section: EncoderSection, earlier: Mapping[str, Any] | None) -> str | None:
    """Return the encoder's form; None means the default form. `stated`: a form, or auto for the form of `earlier`.

    Raises InputError if this kind of encoder does not have the form, or if the form needs a missing package.
    """
    form = (earlier or {}).get("form") if stated == AUTO_FORM else stated
    first, *others = forms_of(section)
    if stated != AUTO_FORM and not (others and stated in forms_of(section)):
        raise InputError(
            f"{option('form', stated)}: encoder.kind = {section.kind!r} has only the form {first}. Leave it out."
        )
    if form not in others:
        return None
    for module in ("onnxruntime", "onnxscript"):
        if find_spec(module) is None:
            raise missing_extra(f"{option('form', form)} needs {module}", "onnx-export")
    return form


@dataclass(frozen=True)
class ConvertedEncoder:
    """An encoder in a non-default form, written to `folder`, and PyTorch's encoder `plain`, in float32 on the CPU.

    `rows`: rows of the data. `distance` compares x of both encoders on these rows: the largest absolute difference,
    divided by the largest absolute value in x, and the mean cosine.
    """

    folder: Path
    served: Embedder
    plain: Embedder
    rows: Inputs
    distance: dict[str, float]

    @classmethod
    def write(cls, form: str, section: EncoderSection, source: Path, rows: Inputs) -> "ConvertedEncoder":
        """Convert the encoder at `source`, which `Encoder.write` wrote, to a form in a folder next to `source`.

        Raises InputError if the model cannot be written as a graph, or if x from the graph differs from PyTorch's x.
        """
        folder = source.with_name(f"{source.name}-{form}")
        folder.mkdir()
        exact = section.at_folder(str(source)).model_copy(update={"precision": "float32", "compile": False})
        encoder = exact.build(0, 0)
        encoder.load(source)
        try:
            write_onnx(encoder, folder, form == _INT8)
        except Exception as error:  # from any part of PyTorch's exporter, which names a cause after some advice
            cause = error.__cause__ or error
            reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:200].rstrip(".")
            raise InputError(
                f"{option('form', form)}: this model cannot be written as a graph: {reason}. Leave it out."
            ) from error
        served = import_name(forms_of(section)[form]).open(section, folder, lambda name: MappedFile(str(folder / name)))
        plain = TorchInference(encoder)
        return cls(folder, served, plain, rows, _require_near(form, served.embed(rows), plain.embed(rows)))

    def compare(self, serving: Serving, say: Callable[[str], None]) -> dict[str, float]:
        """Return `distance`, and the fractions of top labels on which `serving` and PyTorch's encoder agree."""
        ids, plain = (replace(serving, encoder=each).rank(self.rows, _DEPTH)[1] for each in (self.served, self.plain))
        shared = float(Ragged.from_matrix(plain).contains(ids).sum() / max(1, (plain != PAD).sum()))
        best = float((ids[:, 0] == plain[:, 0]).sum() / max(1, len(ids)))
        far = f"the largest error in x is {self.distance['difference']:.1g} times the largest value in x"
        say(f"{best:.1%} of {len(ids):,} queries have the same best label as with PyTorch; {far}")
        return {"queries": len(ids), **self.distance, "same_best": best, f"same_of_{_DEPTH}": shared}


def _require_near(form: str, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Compare a form's x [B, D] with PyTorch's y; return the distances. Raises InputError if x is too far from y."""
    difference = float(np.abs(x - y).max(initial=0) / max(np.abs(y).max(initial=0), 1e-12))
    cosine = float((unit(x) * unit(y)).sum() / max(1, len(x)))
    if len(x) and not (cosine >= _MIN_COSINE if form == _INT8 else difference <= _MAX_DIFFERENCE):
        expected = f"a cosine >= {_MIN_COSINE:g}" if form == _INT8 else f"a difference <= {_MAX_DIFFERENCE:g}"
        raise InputError(
            f"{option('form', form)}: on {len(x):,} rows of the data, the graph's x differs from PyTorch's x: mean "
            f"cosine {cosine:.4f}, largest difference {difference:.1g} times the largest value. Expected {expected}. "
            f"Leave {option('form')} out."
        )
    return {"difference": difference, "cosine": cosine}


class _Graph(nn.Module):
    def __init__(self, encoder: TransformerEncoder) -> None:
        super().__init__()
        self._encoder, self.parameters_of = encoder, encoder._modules

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self._encoder.encode(PaddedInputs(input_ids, attention_mask.bool()))


def write_onnx(encoder: TransformerEncoder, folder: Path, int8: bool) -> None:
    """Write the graph of `encoder`, which must be on the CPU, to `folder`, with the tensors in a second file."""
    from onnxruntime.quantization import QuantType, quantize_dynamic  # only the extra `onnx` installs it

    from scoring.onnx_inference import FILE, INPUTS, OUTPUT

    # There are two tensors, because a single tensor would become one input. No size is 0 or 1, because a graph may
    # treat these sizes as constants.
    example = torch.ones((2, 3), dtype=torch.int64), torch.ones((2, 3), dtype=torch.int64)
    with contextlib.ExitStack() as stack:
        # Libraries would report missing parts and print advice.
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        free = torch.export.Dim.DYNAMIC
        traced = torch.export.export(_Graph(encoder), example, dynamic_shapes=({0: free, 1: free},) * 2, strict=False)
        program = torch.onnx.export(traced, input_names=INPUTS, output_names=[OUTPUT], dynamo=True, verbose=False)
        assert program is not None
        for node in program.model.graph:
            node.metadata_props.clear()  # lines of code, with paths on this machine
        if not int8:
            program.save(folder / FILE, external_data=True)
        else:
            # Weights have seven bits: with eight bits, sums overflow on processors without VNNI.
            options = {"weight_type": QuantType.QInt8, "per_channel": True, "reduce_range": True}
            quantize_dynamic(program.model_proto, folder / FILE, use_external_data_format=True, **options)
