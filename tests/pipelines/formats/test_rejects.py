import random
from collections import Counter

from pipelines.flow import FileExchange, Flow
from pipelines.formats.base import Reason, Reject
from pipelines.job import REJECTED, SHOWN, StagedBlock, Summary, read_summary, write_sum
from pipelines.runners.local import choose_runner
from pipelines.sharding.read import report_rejects


def test_the_first_and_the_counts_do_not_depend_on_the_order_of_merging() -> None:
    rejects = [Reject(f"f{i % 3}", i, list(Reason)[i % 4], "x") for i in range(40)]
    made = set()
    for seed in range(5):
        shuffled = random.Random(seed).sample(rejects, len(rejects))
        parts = [report_rejects("t", shuffled[i : i + 7], FileExchange("memory://rejects")) for i in range(0, 40, 7)]
        merged = Summary.sum_of([parts[0], Summary.sum_of(parts[1:])])
        made.add((tuple(merged.reasons("t").items()), merged.rejects))
    ((counts, first),) = made
    assert sum(n for _, n in counts) == 40
    assert first == tuple(sorted(rejects)[:SHOWN])


def test_a_summary_survives_its_file() -> None:
    summary = Summary(
        blocks=(
            StagedBlock("train", 0, 3, ("a", 0, 9, 1), ("a", 9, 4, 2), None),
            StagedBlock("train", 0, 4, ("b", 0, 9, 3), ("b", 9, 4, 4), ("b", 13, 2, 5)),
        ),
        rejected=(("train", ("c", 0, 5, 6)),),
        files={"u": (7, "ab")},
        counters={REJECTED + "t": Counter({Reason.NOT_JSON.value: 1})},
        rejects=(Reject("f", 3, Reason.NOT_JSON, "é"),),
    )
    flow = Flow()
    write_sum(flow.create("Summaries", [summary]), "memory://summary.json")
    choose_runner().run(flow)
    assert read_summary("memory://summary.json") == summary
