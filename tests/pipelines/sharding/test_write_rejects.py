"""Rejects that are sorted a range of lines at a time are those that are sorted together."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.flow import FileExchange, gather
from pipelines.formats.base import Reason, Reject, rejects_batch
from pipelines.sharding import publish
from schemas import arrow
from schemas.shard_files import parquet

REJECT = st.builds(Reject, st.sampled_from("abé"), st.integers(1, 40), st.sampled_from(Reason), st.text(max_size=2))
MESSAGES = st.lists(
    st.tuples(st.sampled_from(["train", "labels"]), st.lists(REJECT, min_size=1, max_size=9)), max_size=9
)


@given(MESSAGES, st.integers(1, 50), st.sampled_from([1, 1 << 20]))
def test_order_and_bytes(messages: list[tuple[str, list[Reject]]], lines: int, held: int) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "_LINES", lines)
        patch.setattr(publish, "_GROUP_ROWS", 4)
        patch.setattr("pipelines.flow._HELD_BYTES", held)
        sent = list(FileExchange(f"{folder}/sent").send((table, rejects_batch(rows)) for table, rows in messages))
        made = publish.write_rejects(f"{folder}/data", sent, FileExchange(f"{folder}/sorted"))
        names = sorted({table for table, _ in messages})
        assert made.parameters == {"tables": names}
        assert made.rows == sum(len(rows) for _, rows in messages)
        for number, table in enumerate(names):
            rows = gather([packet for name, packet in sent if name == table], arrow.rejects())
            rows = rows.sort_by([(name, "ascending") for name in rows.column_names])
            whole = parquet.write_shard(f"{folder}/whole", number, len(names), rows, 4)
            assert made.shards[number] == whole
            assert (Path(folder, "data/rejects", whole.path)).read_bytes() == Path(
                folder, "whole", whole.path
            ).read_bytes()
