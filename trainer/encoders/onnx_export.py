"""Writes a transformer as an ONNX graph, from token ids to x, for `OnnxInference`; optionally in int8."""

import contextlib
import logging
import warnings
from pathlib import Path

import torch
from torch import nn

from trainer.encoders.onnx_inference import FILE, INPUTS, OUTPUT
from trainer.encoders.transformer_encoder import PaddedInputs, TransformerEncoder


class _Graph(nn.Module):
    def __init__(self, encoder: TransformerEncoder) -> None:
        super().__init__()
        self._encoder, self.parameters_of = encoder, encoder._modules

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self._encoder.encode(PaddedInputs(input_ids, attention_mask.bool()))


def write_onnx(encoder: TransformerEncoder, folder: Path, int8: bool) -> None:
    """Write the graph of `encoder`, which must be on the CPU, to `folder`, with the tensors in a second file."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

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
