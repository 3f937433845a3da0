"""Bins of equal frequency mass, and their parts of P@k."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InputError
from schemas.ragged import Ragged
from trainer.evaluation.metrics import LabelGroups, bins_of_equal_mass


@given(st.lists(st.integers(0, 50), min_size=1, max_size=200).filter(any), st.integers(1, 12))
def test_bins_hold_equal_mass(counts: list[int], bins: int) -> None:
    frequency = np.array(counts)
    bin_of = bins_of_equal_mass(frequency, bins)
    share = frequency.sum() / bins
    # A bin is off by the part of a label that reaches over either of its ends, so by less than the greatest label.
    mass = np.bincount(bin_of, weights=frequency, minlength=bins)
    assert (np.abs(mass - share) < frequency.max() + 1e-9).all()
    head_first = np.argsort(-frequency, kind="stable")
    assert (np.diff(bin_of[head_first]) >= 0).all()
    assert (bin_of[frequency == 0] == bins - 1).all()


def test_a_label_without_frequency_is_refused() -> None:
    with pytest.raises(InputError, match=r"label 5 .* \[0, 3\)"):
        LabelGroups(np.zeros(3, np.int64), ["all"]).update(np.array([[5]]), Ragged(np.array([5]), np.array([0, 1])))
