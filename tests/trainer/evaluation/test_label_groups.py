"""Groups of labels."""

import numpy as np
import pytest

from schemas.errors import InputError
from schemas.ragged import Ragged
from trainer.evaluation.metrics import LabelGroups


def test_a_label_without_frequency_is_refused() -> None:
    with pytest.raises(InputError, match=r"label 5 .* \[0, 3\)"):
        LabelGroups(np.zeros(3, np.int64), ["all"]).update(np.array([[5]]), Ragged(np.array([5]), np.array([0, 1])))
