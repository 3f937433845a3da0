"""Form of an export's encoder: the default files, or an ONNX graph that is compared with PyTorch on the data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from schemas import PAD
from schemas.errors import InputError, MissingExtra
from schemas.mapped import MappedFile
from schemas.ragged import Ragged
from trainer.encoders.bag import unit
from trainer.encoders.torch_inference import TorchInference
from trainer.export.exported import Embedder, Serving, forms_of
from trainer.inputs import Inputs
from trainer.methods.kinds import EncoderSection, import_name

AUTO_FORM = "auto"
_INT8 = "onnx-int8"
_EXTRAS = {"onnxruntime": "onnx", "onnxscript": "trainer"}
_MAX_DIFFERENCE = 1e-4  # largest float32 difference of x, as a fraction of the largest absolute value
_MIN_COSINE = 0.9  # least mean cosine of int8 with float32
_LEAST = 1e-12  # least divisor
_DEPTH = 5  # number of labels per query that are compared


def choose_form(stated: str, section: EncoderSection, earlier: Mapping[str, Any] | None) -> str | None:
    """Return the encoder's form; None means the default form. `stated`: a form, or auto for the form of `earlier`.

    Raises InputError if this kind of encoder does not have the form, or if the form needs a missing package.
    """
    form = (earlier or {}).get("form") if stated == AUTO_FORM else stated
    first, *others = forms_of(section)
    if stated != AUTO_FORM and not (others and stated in forms_of(section)):
        raise InputError(
            f"--form {stated}: encoder.kind = {section.kind!r} has only the form {first}. Leave --form out."
        )
    for module, extra in _EXTRAS.items() if form in others else ():
        if find_spec(module) is None:
            raise MissingExtra(f"--form {form} needs {module}", extra)
    return form if form in others else None


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
        from trainer.encoders.onnx_export import write_onnx

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
                f"--form {form}: this model cannot be written as a graph: {reason}. Leave --form out."
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
    difference = float(np.abs(x - y).max(initial=0) / max(np.abs(y).max(initial=0), _LEAST))
    cosine = float((unit(x) * unit(y)).sum() / max(1, len(x)))
    if len(x) and not (cosine >= _MIN_COSINE if form == _INT8 else difference <= _MAX_DIFFERENCE):
        expected = f"a cosine >= {_MIN_COSINE:g}" if form == _INT8 else f"a difference <= {_MAX_DIFFERENCE:g}"
        raise InputError(
            f"--form {form}: on {len(x):,} rows of the data, the graph's x differs from PyTorch's x: mean cosine "
            f"{cosine:.4f}, largest difference {difference:.1g} times the largest value. Expected {expected}. Leave "
            "--form out."
        )
    return {"difference": difference, "cosine": cosine}
