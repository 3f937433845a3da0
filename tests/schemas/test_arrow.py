"""The columns of the tables."""

import pyarrow as pa
import pytest

from schemas import arrow


@pytest.mark.parametrize(
    ("tokens", "features", "inputs"),
    [
        (pa.uint16(), False, ["input_ids"]),
        (None, True, ["feature_ids", "feature_values"]),
        (pa.uint32(), True, ["input_ids", "feature_ids", "feature_values"]),
    ],
)
def test_a_row_has_token_ids_or_features_or_both(tokens: pa.DataType | None, features: bool, inputs: list[str]) -> None:
    queries = arrow.queries(tokens, pa.int32(), features=features, filters=True, text=True)
    assert queries.names == ["query_id", "key", *inputs, "label_ids", "filter_label_ids", "text"]
    assert arrow.labels(tokens, features=features).names == ["label_id", "key", "text", *inputs, "frequency"]
    assert not any(field.nullable for field in queries)


def test_a_row_without_anything_to_read_is_refused() -> None:
    with pytest.raises(ValueError, match="got none of the three"):
        arrow.queries(None, pa.int32())
    with pytest.raises(ValueError, match="got none of the three"):
        arrow.labels(None)
