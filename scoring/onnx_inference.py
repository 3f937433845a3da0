"""An ONNX graph as the encoder of an export, computed without PyTorch."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnxruntime

from schemas import PAD
from schemas.mapped import MapFile
from schemas.ragged import batches_by_length
from trainer.inputs import Inputs
from trainer.methods.kinds import TransformerSection
from trainer.threads import RANGES, map_ranges

FILE = "model.onnx"
INPUTS, OUTPUT = ["input_ids", "attention_mask"], "sentence_embedding"  # input names as in Optimum


class OnnxInference:
    """Computes x with an ONNX graph from ids and a mask, int64 [B, T]; up to rounding, rows do not affect each other.

    Each thread computes whole batches, so x does not depend on the number of threads. onnxruntime starts no threads, so
    a forked process can use the graph.
    """

    TOKENS: ClassVar[int] = 1024  # tokens of a batch, including padding

    @classmethod
    def open(cls, section: TransformerSection, folder: Path, map_file: MapFile, *_: Any) -> "OnnxInference":
        """Open the files that `write_onnx` wrote. Raises ValueError for a graph with other inputs or outputs."""
        map_file(f"{FILE}.data")  # onnxruntime maps the tensors itself, so processes share them
        return cls(section, map_file(FILE).path)

    def __init__(self, section: TransformerSection, path: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors only: warnings are about the optimization of the graph
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._section = section
        inputs = [each.name for each in self._session.get_inputs()]
        outputs = {each.name: each.shape[-1:] for each in self._session.get_outputs()}
        if (inputs, outputs) != (INPUTS, {OUTPUT: [section.dimension]}):
            raise ValueError(f"{FILE}: the graph has inputs {inputs} and outputs {outputs}")

    def embed(self, inputs: Inputs) -> np.ndarray:
        """Return x float32 [B, D]."""
        assert inputs.tokens is not None, "a transformer reads tokens"
        tokens, most = inputs.tokens, self._section.max_tokens
        x = np.empty((tokens.rows, self._section.dimension), np.float32)
        batches = [*batches_by_length(np.minimum(tokens.counts, most), self.TOKENS)]

        def work(number: int, *_: int) -> None:
            for rows in batches[number::RANGES]:
                part = tokens.take(rows)
                ids = part.padded()[:, :most] if part.longest else np.full((len(rows), 1), PAD)
                ids[:, 0] = np.maximum(ids[:, 0], 0)  # an empty row attends to one pad
                fed = dict(zip(INPUTS, (np.maximum(ids, 0), (ids != PAD).astype(np.int64)), strict=True))
                x[rows] = self._session.run(None, fed)[0]

        map_ranges(work, len(batches), min_rows=2)
        return x


class OnnxInt8Inference(OnnxInference):
    """Computes one row at a time, because int8 scales depend on a batch's largest value; x depends only on the row."""

    TOKENS = 1
