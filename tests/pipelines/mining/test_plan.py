from pipelines.mining import index
from pipelines.mining.dump import Dump, Source
from pipelines.mining.options import AUTO, MineOptions
from pipelines.mining.plan import make_plan
from schemas import tables
from schemas.manifest import Manifest, columns_of

LABELS, QUERIES = 200_000, 2_000_000


def source(name: str, rows: int) -> Source:
    return Source(name, f"data/{name}", Manifest(kind=name, rows=rows), f"run/{name}", Manifest(kind="embeddings"))


def test_what_is_made_already_does_not_change_how_the_rest_is_made() -> None:
    few, many = source("labels", LABELS // 100), source("queries", QUERIES)
    assert index.choose(AUTO, LABELS, few.queries.rows, None) != index.choose(AUTO, LABELS, QUERIES, None)
    columns = columns_of(tables.vectors(8))
    vectors = Manifest(kind="vectors", columns=columns, rows=LABELS, parameters={"table_width": 5})
    dump = Dump(1, "run/vectors", vectors, (many, few))
    whole = make_plan(dump, dump.sources, "run", MineOptions())
    rest = make_plan(dump, (few,), "run", MineOptions())
    assert rest.parameters() == whole.parameters()
    assert rest.bounds == whole.bounds
