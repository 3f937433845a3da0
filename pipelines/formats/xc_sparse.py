"""XC form with sparse features: label matrix, feature matrix, and where there are any the texts beside them."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.formats import xc_files
from pipelines.formats.aligned_files import FEATURES, JSON, TEXT
from pipelines.formats.base import LABELS, Inputs
from pipelines.formats.xc_aligned import Aligned


@dataclass(frozen=True)
class XcSparse(Aligned):
    """`trn_X_Y.txt`, `trn_X_Xf.txt`, and where there are any those of `tst` and `val`, `lbl_X_Xf.txt`, and texts.

    A matrix is text (first line `rows columns`, then fields `index:value`) or an .npz file of SciPy. Texts are lines
    (`trn_X.txt`) or the records of the raw form (`trn.json.gz`), whose `target_ind` serves where `trn_X_Y` is missing.
    """

    name: str = "xc-sparse"
    expects: str = "trn_X_Xf.txt, trn_X_Y.txt, and where there are any lbl_X_Xf.txt, tst_X_Xf.txt, tst_X_Y.txt, texts"

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return xc_files.is_any(names, "train", FEATURES)

    def find(self, source: str) -> Inputs:
        return xc_files.find_parts(source, self.name, self.expects, (LABELS, FEATURES, TEXT, JSON), FEATURES)
