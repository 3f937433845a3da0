import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats.base import Reason
from pipelines.formats.from_lines import parse_tabbed_pairs

KEY = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6)
WEIGHT = st.none() | st.integers(-2, 3) | st.floats(-2, 2, width=16)


def block(lines: list[bytes]) -> pa.RecordBatch:
    return pa.record_batch({"line": pa.array(lines, pa.large_binary())})


@settings(deadline=None)
@given(st.lists(st.tuples(KEY, KEY.filter(str.strip), WEIGHT), max_size=8), st.integers(1, 1000))
def test_pairs_against_plain_reading(pairs: list[tuple[str, str, float | None]], first: int) -> None:
    lines = [("\t".join([q, p] + ([] if w is None else [str(w)]))).encode() for q, p, w in pairs]
    parsed = parse_tabbed_pairs(block(lines), first, "f")
    assert parsed.rejects == []
    expected = [(first + i, q, p.strip()) for i, (q, p, w) in enumerate(pairs) if w is None or w > 0]
    assert [tuple(row.values()) for row in parsed.batch.to_pylist()] == expected


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b"q", Reason.MALFORMED, "expected query key, label key[, weight] separated by tabs, got 'q'"),
        (b"q d 1", Reason.MALFORMED, "separated by tabs, got 'q d 1'"),
        (b"q\t0\td\t1", Reason.MALFORMED, r"got 'q\t0\td\t1'"),
        (b"\td\t1", Reason.MALFORMED, "an empty key"),
        (b"q\t\t1", Reason.MALFORMED, "an empty key"),
        (b"q\td\t", Reason.MALFORMED, "the weight is not a number"),
        (b"q\td\tx", Reason.MALFORMED, "the weight is not a number"),
        (b"q\td\tnan", Reason.MALFORMED, "the weight is not a number"),
        (b"q\td\t 1", Reason.MALFORMED, "the weight is not a number"),
        (b"q\xff\td\t1", Reason.NOT_UNICODE, "a key is not UTF-8"),
        (b"q\t\xfed\t1", Reason.NOT_UNICODE, "a key is not UTF-8"),
    ],
)
def test_one_bad_line_is_rejected_and_named(line: bytes, reason: Reason, detail: str) -> None:
    parsed = parse_tabbed_pairs(block([b"a\tb\t1", line, b"", b"c\td"]), 10, "qrels/train.tsv")
    assert [row["query_key"] for row in parsed.batch.to_pylist()] == ["a", "c"]
    (reject,) = parsed.rejects
    assert (reject.file, reject.line, reject.reason) == ("qrels/train.tsv", 12, reason)
    assert detail in reject.detail


@pytest.mark.parametrize("header", [b"query-id\tcorpus-id\tscore", b"query_key\tlabel_key", b"qid\tdocid\trel"])
def test_a_header_is_no_pair(header: bytes) -> None:
    lines = block([header, b"q\td\t1"])
    assert parse_tabbed_pairs(lines, 0, "f").batch.to_pylist() == [{"row": 1, "query_key": "q", "label_key": "d"}]
    assert parse_tabbed_pairs(lines, 0, "f").rejects == []
    later = parse_tabbed_pairs(lines, 7, "f")
    assert later.batch.num_rows + len(later.rejects) == 2


@settings(deadline=None, max_examples=200)
@given(st.lists(st.binary(max_size=12) | st.text("q\t1.-e", max_size=8).map(str.encode), max_size=6))
def test_hostile_lines_do_not_change_their_neighbours(lines: list[bytes]) -> None:
    together = parse_tabbed_pairs(block(lines), 1, "f")
    alone = [parse_tabbed_pairs(block([line]), 1 + row, "f") for row, line in enumerate(lines)]
    assert together.batch.to_pylist() == [row for parsed in alone for row in parsed.batch.to_pylist()]
    assert together.rejects == [reject for parsed in alone for reject in parsed.rejects]
