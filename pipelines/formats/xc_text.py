"""XC form with plain text: one text a line, and a label matrix beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.formats import xc_files
from pipelines.formats.aligned_files import FEATURES, TEXT
from pipelines.formats.base import LABELS, Inputs
from pipelines.formats.xc_aligned import Aligned


@dataclass(frozen=True)
class XcText(Aligned):
    """`trn_X.txt`, `trn_X_Y.txt`, `Y.txt` (one text a line, one label a line), and where there are any those of `tst`
    and `val`.

    Texts may be called `trn.raw.txt`, `lbl.raw.txt`, or `raw_data/train.raw.txt`, `raw_data/label.raw.txt`, and lie
    under `raw/`; the label matrix may be `trn_X_Y.npz` or `Y.trn.npz`.
    """

    name: str = "xc-text"
    expects: str = "trn_X.txt (or trn.raw.txt), trn_X_Y.txt (or Y.trn.npz), Y.txt (or lbl.raw.txt), and those of tst"

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return xc_files.is_any(names, "train", TEXT) and not xc_files.is_any(names, "train", FEATURES)

    def find(self, source: str) -> Inputs:
        return xc_files.find_parts(source, self.name, self.expects, (LABELS, TEXT), TEXT)
