"""Tables of several miners as one, against lists in Python; and what is refused."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pipelines.mine import MineOptions, mine
from pipelines.mining.derived import MergeOptions, merge
from schemas import arrow, storage
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.shard_files.parquet import matrix_array
from schemas.shard_files.shards import write_table
from schemas.storage import join
from schemas.table import Table
from tests.command import call, refused
from tests.pipelines.mining.test_choice import WORDS, excluded, planted, shards
from tests.pipelines.mining.world import World, random_rows, read_negatives

ROWS, LABELS = 20, 30


def small_world(root: str, seed: int = 0) -> World:
    generator = np.random.default_rng(seed)
    world = World(
        data=join(root, "data"),
        run=join(root, "run"),
        queries=generator.integers(-3, 4, (ROWS, 3)),
        vectors=generator.integers(-3, 4, (LABELS, 3)),
        positives=random_rows(generator, ROWS, LABELS, 4),
        filters=random_rows(generator, ROWS, LABELS, 3),
        texts=[WORDS[i] for i in generator.integers(0, len(WORDS), LABELS)],
        with_labels=True,
    )
    world.write_dump()
    return world


def foreign(world: World, url: str, rows: list[list[int]], width: int, source: str = "queries", **parameters) -> str:
    """Write a table as another library would: rows of labels, the best first, and whole numbers as scores."""
    data = DataLayout(world.data)
    parent = open_manifest(data.labels if source == "labels" else data.queries("train"))
    padded = np.asarray([(row + [-1] * width)[:width] for row in rows])
    scores = np.where(padded < 0, -np.inf, -np.arange(width, dtype=np.float16)).astype(np.float16)
    columns = [pa.array(np.arange(len(rows))), matrix_array(padded, pa.int32()), matrix_array(scores, pa.float16())]
    table = pa.Table.from_arrays(columns, schema=arrow.negatives(width, pa.int32()))
    pieces = [table.slice(low, high - low) for low, high in world.edges(len(rows))]
    fields = {"parents": {"queries": parent.digest}, "parameters": parameters, "id_range": (0, len(rows))}
    write_table(url, "negatives", pieces, world.row_group_rows, **fields)
    return url


def merged(tables: list[list[list[tuple[float, int]]]], by: str, gone: list[set[int]], width: int) -> list[list[int]]:
    """Merge rows of (score, label) of each table, one by one."""
    result = []
    for row, own in zip(zip(*tables, strict=True), gone, strict=True):
        turns = [pair for rank in range(max(map(len, row))) for each in row for pair in each[rank : rank + 1]]
        order = turns if by == "turns" else sorted(turns, key=lambda pair: (-pair[0], pair[1]))
        labels = [label for label in dict.fromkeys(label for _, label in order) if label not in own]
        result.append((labels + [-1] * width)[:width])
    return result


@settings(
    max_examples=20,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32),
    widths=st.lists(st.integers(1, 7), min_size=2, max_size=3),
    width=st.none() | st.integers(1, 5),
    by=st.sampled_from(["turns", "score"]),
    rule=st.sampled_from(["equal", "near", "off"]),
    source=st.sampled_from(["queries", "labels"]),
)
def test_a_row_has_each_label_once_and_no_positive(tmp_path, seed, widths, width, by, rule, source):
    shutil.rmtree(tmp_path, ignore_errors=True)
    world, generator = small_world(str(tmp_path), seed), np.random.default_rng(seed)
    width = None if width is None else min(width, sum(widths))
    urls, tables = [], []
    for number, most in enumerate(widths):
        rows = [generator.permutation(row).tolist() for row in random_rows(generator, LABELS, LABELS, most)]
        rows = rows[: LABELS if source == "labels" else ROWS]
        urls.append(foreign(world, str(tmp_path / f"table-{number}"), rows, most, source))
        tables.append([[(-float(rank), label) for rank, label in enumerate(row)] for row in rows])
    out = str(tmp_path / "out")
    manifest = merge(world.data, urls, out, MergeOptions(by=by, width=width, equal_texts=rule))
    ids, label_ids, _ = read_negatives(out, manifest)
    gone = excluded(world, source, None if rule == "off" else rule)
    assert label_ids.tolist() == merged(tables, by, gone, width or max(widths))
    assert ids.tolist() == list(range(len(label_ids)))
    counters = manifest.counters
    drops = ("repeated", "positives_dropped", "filtered_dropped", "same_text_dropped", "outranked")
    assert counters["candidates"] == counters["kept"] + sum(counters[name] for name in drops)
    assert counters["candidates"] == sum(len(row) for rows in tables for row in rows)
    assert counters["kept"] == (label_ids >= 0).sum()
    assert counters["padded_rows"] == (label_ids < 0).any(axis=1).sum()
    Table.open(out, "negatives").verify()


def test_a_mined_table_and_another_give_the_same_bytes_anywhere(tmp_path):
    world = planted(str(tmp_path), labels=80, rows=60, shards=3)
    mine(world.data, world.run, options=MineOptions(out=str(tmp_path / "mined"), width=6))
    rows = random_rows(np.random.default_rng(0), 60, 80, 6)
    urls = [str(tmp_path / "mined" / "queries"), foreign(world, str(tmp_path / "bm25"), rows, 6)]
    contents = []
    for number, flags in enumerate(([], ["--direct_num_workers=2", "--direct_running_mode=multi_threading"])):
        manifest = merge(world.data, urls, str(tmp_path / f"out-{number}"), beam_options=flags)
        contents.append(shards(str(tmp_path / f"out-{number}")))
    assert len(contents[0]) == 3
    assert contents[0] == contents[1]
    assert merge(world.data, urls, str(tmp_path / "out-0")) == manifest  # it is there
    first, second = (open_manifest(url) for url in urls)
    queries = open_manifest(DataLayout(world.data).queries("train")).digest
    assert manifest.parents == {"queries": queries, "table-0": first.digest, "table-1": second.digest}
    assert manifest.parameters["use_from"] == 5
    assert manifest.counters["same_text_dropped"] > 0  # of the table whose miner did not compare texts
    with pytest.raises(InputError, match=r"made with other options \(merged was 'turns', now it is 'score'\)"):
        merge(world.data, urls, str(tmp_path / "out-0"), MergeOptions(by="score"))


def test_the_trainer_reads_it(tmp_path):
    """As a table of the run, in the place of its own."""
    from schemas.table import run_tables

    world = small_world(str(tmp_path))
    mine(world.data, world.run, options=MineOptions(out=str(tmp_path / "mined")))
    other = foreign(world, str(tmp_path / "bm25"), random_rows(np.random.default_rng(0), ROWS, LABELS, 5), 5)
    out = world.layout.negatives(5, "queries")
    merge(world.data, [str(tmp_path / "mined" / "queries"), other], out)
    (found,) = run_tables(world.layout)
    assert (found.epoch, found.source) == (5, "queries")
    found.table.require_aligned(Table.open(DataLayout(world.data).queries("train")), "")


class TestRefused:
    @pytest.fixture
    def world(self, tmp_path: Path) -> World:
        return small_world(str(tmp_path))

    def rows(self) -> list[list[int]]:
        return [[0, 1]] * ROWS

    def test_tables_of_other_rows_labels_or_ranges(self, world, tmp_path):
        good = foreign(world, str(tmp_path / "good"), self.rows(), 2)
        other = foreign(world, str(tmp_path / "labels"), [[0]] * LABELS, 1, "labels")
        more = foreign(world, str(tmp_path / "more"), self.rows(), 2, labels=LABELS + 1)
        ranges = foreign(world, str(tmp_path / "ranges"), self.rows(), 2, ranges=[[0, 9], [9, 30]])
        beyond = foreign(world, str(tmp_path / "beyond"), [[LABELS, 1]] * ROWS, 2)
        out = str(tmp_path / "out")
        for url, words in (
            (other, r"was built from a queries table"),
            (more, r"more: this table was built with 31 labels, but .* has 30\. Make the table again"),
            (ranges, r"ranges: this table has columns for each label range\. Make it again without ranges"),
            (beyond, r"part-0000\d-of-00002\.parquet: a label id is outside \[0, 30\)"),
        ):
            with pytest.raises(TableError, match=words):
                merge(world.data, [good, url], out)
            assert storage.list_names(out) == []
        with pytest.raises(TableError, match=r"good: this table was built from rows that are not in .*\. Give the D"):
            merge(small_world(str(tmp_path / "other"), 1).data, [good, good], out)

    def test_one_table_and_too_large_a_width(self, world, tmp_path):
        good, out = foreign(world, str(tmp_path / "good"), self.rows(), 2), tmp_path / "out"
        refused(call("merge", world.data, good, out), "only one table is given", "--others")
        refused(
            call("merge", world.data, good, out, "--others", good, "--width", 5),
            "--width 5",
            "4 negatives for each row",
        )
        done = call("merge", world.data, good, out, "--others", good, "--width", 3, "--json")
        assert done.status == 0, done.err
        assert done.json["counters"]["repeated"] == 2 * ROWS
        assert call("inspect", out).status == 0
