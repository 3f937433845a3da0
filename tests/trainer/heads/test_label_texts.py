"""Labels taken by id from scratch files are the rows of the table."""

import numpy as np
import pytest

from schemas.errors import InputError
from tests.builders import build_data, value_of
from trainer.heads.label_encoder import open_label_texts


@pytest.mark.parametrize("kind", ["tokens", "features", "both"])
def test_any_labels_in_any_order_are_their_rows(kind: str, tmp_path: object) -> None:
    data = build_data(str(tmp_path), features=9)
    texts = open_label_texts(data.layout, kind)
    ids = np.random.default_rng(0).integers(0, data.labels, 50)
    for selection in (ids, np.arange(data.labels), np.empty(0, np.int64)):
        inputs = texts.take(selection)
        points = data.label_points
        if kind != "features":
            assert (
                inputs.tokens.offsets.tolist() == np.cumsum([0, *(len(points.tokens[i]) for i in selection)]).tolist()
            )
            assert inputs.tokens.values.tolist() == [token for i in selection for token in points.tokens[i]]
        if kind != "tokens":
            assert inputs.features.ids.tolist() == [feature for i in selection for feature in points.features[i]]
            assert inputs.features.values.tolist() == [
                value for i in selection for value in value_of(points.features[i])
            ]


def test_labels_without_what_is_read_are_refused(tmp_path: object) -> None:
    data = build_data(str(tmp_path))
    with pytest.raises(InputError, match="feature_ids"):
        open_label_texts(data.layout, "features")
