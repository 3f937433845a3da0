"""Shares of trials, of any number of rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extremis.auto.trials import QUERIES, holdout_share
from trainer.config import load_recipe


@given(st.integers(1, 10**11))
def test_a_recipe_takes_the_share_that_is_held_out(rows: int) -> None:
    share = holdout_share(rows)
    data = load_recipe("random", [f"data.holdout={share}"]).data
    assert data.holdout == share > 0
    held_out = data.held_out.rows(rows)
    assert held_out <= QUERIES * 1.01 + 1
    assert held_out + data.trained.rows(rows) == rows
    assert rows < 40_000 or held_out == pytest.approx(QUERIES, rel=0.01)
