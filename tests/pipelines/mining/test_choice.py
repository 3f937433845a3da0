"""What a row gets: the rules on candidates, alone and together, against brute force over all labels."""

import itertools
import math
import shutil
import unicodedata
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pipelines.mine import MineOptions, mine
from pipelines.mining.filters import find_aliases, is_bounded, read_aliases, select_negatives
from pipelines.mining.inputs import equal_ranges
from pipelines.mining.search import DROPS
from schemas import storage
from schemas.errors import InputError
from schemas.hashing import near, normalized
from schemas.layout import DataLayout
from schemas.manifest import Manifest
from schemas.options import check
from schemas.ragged import Ragged
from schemas.randomness import Purpose
from schemas.storage import join
from schemas.table import Table
from search.exclusions import DEEPEST, Exclusions
from search.topk import pack, unpack
from tests.command import call, refused
from tests.pipelines.mining.world import World, apart, brute_force, random_rows, random_world, read_negatives

WORDS = [
    "red",
    "Red!",
    " RED ",
    "“red”",
    "Straße",
    "STRASSE",
    "ﬁne",
    "fine",
    "a b",
    "b  A.",
    "",
    " ",
    "?!",
    "C",
    "C#",
    "b",
]
FORMS = {"equal": normalized, "near": near}
slow_starts = settings(
    max_examples=20,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def shards(url: str) -> dict[str, bytes]:
    return {name: storage.read_bytes(join(url, name)) for name in storage.list_names(url) if name.startswith("part")}


def of_equal_text(world: World, source: str, rule: str = "equal") -> list[set[int]]:
    """Return the labels of each row whose text equals a positive's: each pair of texts is compared."""
    texts = [FORMS[rule](text) for text in world.texts or []]
    own = [[label] for label in range(len(texts))] if source == "labels" else world.positives
    same = [{b for b, text in enumerate(texts) if text and text == texts[a]} for a in range(len(texts))]
    return [set[int]().union(*(same[label] for label in row)) for row in own]


def excluded(world: World, source: str, rule: str | None = "equal") -> list[set[int]]:
    plain = world.excluded(source)
    return [a | b for a, b in zip(plain, of_equal_text(world, source, rule), strict=True)] if rule else plain


def tables(world: World, **options: object) -> dict[str, tuple[np.ndarray, Manifest]]:
    """Label ids [N, K] and the manifest of each table, mined anew, with their funnels checked."""
    out = f"{world.run}-out"
    storage.remove(out, recursive=True)
    made = mine(world.data, world.run, options=check(MineOptions, {"out": out, **options}))
    for counters in (manifest.counters for manifest in made.values()):
        assert counters["candidates"] == counters["kept"] + sum(counters[name] for name in (*DROPS, "outranked"))
    return {name: (read_negatives(join(out, name), manifest)[1], manifest) for name, manifest in made.items()}


def table(world: World, **options: object) -> tuple[np.ndarray, Manifest]:
    return tables(world, **options)["queries"]


@pytest.mark.parametrize(
    ("one", "other", "rule"),
    [
        ("Red", " red!", "equal"),
        ("Straße", "STRASSE", "equal"),
        ("ﬁne", "(Fine)", "equal"),
        ("Ａ　ｂ", "a b", "equal"),
        ("x²", "x2", "equal"),
        ("the cat", "cat, the", "near"),
        ("New-York", "york new", "near"),
        ("C", "C#", None),
        ("a b", "ab", None),
    ],
)
def test_texts_are_equal_or_near(one, other, rule):
    assert (normalized(one) == normalized(other)) is (rule == "equal")
    assert (near(one) == near(other)) is (rule is not None or {one, other} == {"C", "C#"})


@given(st.text(max_size=12))
def test_a_normal_form_is_its_own(text):
    assert normalized(normalized(text)) == normalized(text)
    assert near(near(text)) == near(text)
    assert unicodedata.is_normalized("NFKC", normalized(text))


@slow_starts
@given(texts=st.lists(st.sampled_from(WORDS), min_size=1, max_size=30), rule=st.sampled_from(sorted(FORMS)))
def test_equal_texts_are_found_as_by_comparing_all_pairs(tmp_path, texts, rule):
    shutil.rmtree(tmp_path, ignore_errors=True)
    world = random_world(str(tmp_path), rows=9, labels=len(texts), dimension=2, seed=len(texts), texts=texts, most=30)
    world.write_data()
    found = find_aliases(Table.open(DataLayout(world.data).labels), rule)
    expected = of_equal_text(world, "queries", rule)
    if found is None:
        assert all(same <= {*own} for same, own in zip(expected, world.positives, strict=True))
        return
    found.write(str(tmp_path / "aliases"))
    found = read_aliases(str(tmp_path / "aliases"))
    read_aliases.cache_clear()
    positives = Ragged.from_counts(np.concatenate(world.positives).astype(np.int32), [len(p) for p in world.positives])
    same = found.add_to(Exclusions(positives, Ragged.empty(9), Ragged.empty(9))).same_text
    for row, own in enumerate(world.positives):
        got = {*same.values[same.offsets[row] : same.offsets[row + 1]].tolist()}
        assert got | {*own} == expected[row] | {*own}


def mixed(z: int) -> int:
    """SplitMix64, in whole numbers."""
    z = (z + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def place(options: MineOptions, row: int, label: int, score: float) -> float:
    """Return the score with Gumbel noise of (seed, row, label) by which labels are drawn."""
    key = mixed(mixed(mixed(mixed(mixed(mixed(options.seed) ^ Purpose.MINED_RANKS)) ^ row)) ^ label)
    noise = -math.log(-math.log(((key >> 11) + 0.5) / 2**53))
    return noise + (score / (options.temperature or 1.0) if options.sample == "softmax" else 0.0)


def chosen(world: World, source: str, options: MineOptions) -> np.ndarray:
    """The table by every rule, row by row, from the scores of all labels."""
    gone = excluded(world, source, None if options.equal_texts == "off" else options.equal_texts)
    own = [[label] for label in range(len(world.vectors))] if source == "labels" else world.positives
    rows = []
    for row, scores in enumerate(world.scores(source)):
        ranked = sorted({*range(len(scores))} - gone[row], key=lambda label: (-scores[label], label))
        left = ranked[options.skip_top : options.window]
        if own[row] and (options.margin is not None or options.relative_margin is not None):
            weakest = min(scores[label] for label in own[row])
            limit = np.float32(weakest - (options.margin or 0) - (options.relative_margin or 0) * abs(weakest))
            left = [label for label in left if scores[label] < limit]
        left = [label for label in left if options.max_score is None or scores[label] <= options.max_score]
        left = [label for label in left if options.min_score is None or scores[label] >= options.min_score]
        columns: list[int] = []
        for start, stop in equal_ranges(0, len(scores), options.ranges):
            some = [label for label in left if start <= label < stop]
            if options.sample != "top":
                drawn = sorted(some, key=lambda label: -place(options, row, label, scores[label]))[: options.width]
                some = [label for label in some if label in drawn]
            columns += (some + [-1] * options.width)[: options.width]
        rows.append(columns)
    return np.asarray(rows)


def random_choice_world(root: str, seed: int, labels: int) -> World:
    """Small whole numbers: scores are exact, and ties common."""
    generator = np.random.default_rng(seed)
    world = World(
        data=join(root, "data"),
        run=join(root, "run"),
        queries=generator.integers(-3, 4, (20, 3)),
        vectors=generator.integers(-3, 4, (labels, 3)),
        positives=random_rows(generator, 20, labels, 4),
        filters=random_rows(generator, 20, labels, 3),
        texts=[WORDS[i] for i in generator.integers(0, len(WORDS), labels)],
        with_labels=True,
    )
    world.write_dump()
    return world


def perhaps(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | strategy


@slow_starts
@given(
    seed=st.integers(0, 2**32),
    labels=st.integers(2, 30),
    choice=st.fixed_dictionaries(
        {
            "width": st.integers(1, 6),
            "ranges": st.integers(1, 2),
            "equal_texts": st.sampled_from(["equal", "near", "off"]),
            "skip_top": st.integers(0, 3),
            "margin": perhaps(st.integers(0, 4)),
            "relative_margin": perhaps(st.sampled_from([0.0, 0.25, 0.5])),
            "max_score": perhaps(st.integers(-2, 8)),
            "min_score": perhaps(st.integers(-12, -3)),
            "sample": st.sampled_from(["top", "uniform", "softmax"]),
            "seed": st.sampled_from([0, 7, 2**62]),
        }
    ),
    more=perhaps(st.integers(0, 9)),
    cut=st.fixed_dictionaries(
        {
            "block_rows": st.integers(1, 30),
            "query_batch": st.integers(1, 20),
            "tasks_per_block": st.integers(1, 3),
        }
    ),
    together=st.integers(1, 3),
    shallow=st.booleans(),
)
def test_all_rules_together_give_what_brute_force_does(
    tmp_path, monkeypatch, seed, labels, choice, more, cut, together, shallow
):
    """Also without a window, where score limits leave rows short; `shallow`: with a bound of a few ranks of a block."""
    shutil.rmtree(tmp_path, ignore_errors=True)
    monkeypatch.setattr("search.exclusions.DEEPEST", 12 if shallow else DEEPEST)
    world = random_choice_world(str(tmp_path), seed, labels)
    if more is None:
        choice["sample"] = "top"  # a draw needs a window
    window = None if more is None else choice["skip_top"] + choice["width"] + more
    temperature = 3.0 if choice["sample"] == "softmax" else None
    options = check(MineOptions, {**choice, **cut, "window": window, "temperature": temperature, "index": "exact"})
    made = tables(world, **apart(world, options, together).model_dump(exclude={"out"}))
    assert sorted(made) == ["labels", "queries"]
    fetched = max(12, options.skip_top + 2 * options.width)
    for source, (label_ids, manifest) in made.items():
        expected = chosen(world, source, options)
        if shallow and window is None and is_bounded(options):
            within = chosen(world, source, options.model_copy(update={"window": fetched}))
            allowed = chosen(world, source, options.model_copy(update={"width": labels}))
            for got, least, most in zip(label_ids, within, allowed, strict=True):
                assert {*least} <= {*got} | {-1} <= {*most} | {-1}
            assert manifest.parameters["blocks"] > 1 or label_ids.tolist() == within.tolist()
        else:
            assert label_ids.tolist() == expected.tolist()
        assert manifest.counters["padded_rows"] == (label_ids < 0).any(axis=1).sum()
        assert manifest.quality["recall_at_k"] in (1.0, None)


@pytest.mark.parametrize("sample", ["uniform", "softmax"])
def test_draws_follow_their_distribution(sample):
    """K of F without replacement: the share of each rank, against sequential draws by the same weights."""
    scores, rows, width = np.linspace(2, -2, 9, dtype=np.float32), 20_000, 3
    keys = np.broadcast_to(pack(np.arange(9), scores), (rows, 9))
    options = check(MineOptions, {"sample": sample, "window": 9, "seed": 3})
    counts: Counter[str] = Counter()
    kept = select_negatives(np.arange(rows), [keys], np.full(rows, np.inf, np.float32), options, width, counts)
    assert (np.diff(kept.astype(np.float64), axis=1) > 0).all()  # best first
    assert (counts["not_drawn"], counts["kept"]) == (6 * rows, 3 * rows)
    got = np.bincount(unpack(kept)[0].reshape(-1), minlength=9) / rows
    weights = np.exp(scores.astype(np.float64)) if sample == "softmax" else np.ones(9)
    expected = np.zeros(9)
    for some in itertools.permutations(range(9), width):
        chance, left = 1.0, weights.sum()
        for label in some:
            chance *= weights[label] / left
            left -= weights[label]
        expected[list(some)] += chance
    assert np.abs(got - expected).max() < 5 * 0.5 / np.sqrt(rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_score": 0.5, "max_score": 0.4}, r"min_score: expected at most max_score=0.4, .* got 0\.5"),
        ({"sample": "uniform"}, r'window: expected the number of ranks that sample="uniform" draws from, .*window=W'),
        (
            {"sample": "uniform", "window": 9, "temperature": 2},
            r'temperature: expected none, because only sample="softmax" .* got 2',
        ),
        ({"sample": "softmax", "window": 9, "temperature": 0}, r"temperature: expected a number greater"),
        ({"max_score": float("nan")}, r"max_score: expected a finite number"),
        ({"sample": "worst"}, r"sample: expected 'top', 'uniform' or 'softmax'"),
        ({"equal_texts": "yes"}, r"equal_texts: expected 'off', 'equal' or 'near'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        check(MineOptions, options)


def test_the_command_line_chooses_and_refuses(tmp_path):
    world = planted(str(tmp_path), labels=60, rows=30)
    chosen = ("--window", 20, "--sample", "softmax", "--temperature", 0.5, "--max-score", 3, "--min-score", -9)
    done = call("mine", world.data, world.run, *chosen, "--equal-texts", "near", "--json")
    assert done.status == 0, done.err
    assert "labels share their text with another label" in done.err
    assert done.json["tables"]["queries"]["counters"]["not_drawn"] > 0
    refused(
        call("mine", world.data, world.run, "--sample", "uniform"), "that --sample uniform draws from", "--window W"
    )
    few = ("--window", 4, "--sample", "uniform", "--width", 5)
    refused(call("mine", world.data, world.run, *few), "--window 4: the ranks [0, 4) are fewer than K=5")


def planted(root: str, share: float = 0.2, labels: int = 500, rows: int = 400, **fields: object) -> World:
    """Labels of which `share` are another label with its text in capitals and a vector beside its own."""
    world = random_world(root, rows=rows, labels=labels, dimension=8, most=3, **fields)
    generator, copies = np.random.default_rng(1), int(share * labels)
    of = generator.integers(0, labels - copies, copies)
    world.vectors[-copies:] = world.vectors[of] + 0.05 * generator.standard_normal((copies, 8)).astype(np.float32)
    world.texts = [f"Label {i}" for i in range(labels - copies)] + [f" LABEL {i}." for i in of]
    nearest = [int(row[0]) if row else 0 for row in world.positives]
    world.queries = world.vectors[nearest] + 0.3 * generator.standard_normal((rows, 8))
    world.write_dump()
    return world


@pytest.mark.parametrize("index", ["exact", "IVF8,Flat"])
def test_planted_aliases_are_gone_and_counted(tmp_path, index):
    world = planted(str(tmp_path))
    options = {"index": index, "width": 10, "target_recall": 1.0}
    before, first = table(world, equal_texts="off", **options)
    after, second = table(world, **options)
    same = of_equal_text(world, "queries")
    wrong = [
        np.mean([len({*row} & gone) / 10 for row, gone in zip(t.tolist(), same, strict=True)]) for t in (before, after)
    ]
    assert wrong[0] > 0.01
    assert wrong[1] == 0
    assert (after >= 0).all()  # rows are fetched wider by what they lose
    assert first.counters["same_text_dropped"] == 0
    assert second.counters["same_text_dropped"] >= wrong[0] * before.size
    rule = {"rule": "equal", "labels": Table.open(DataLayout(world.data).labels).digest}
    assert (first.parameters["equal_texts"], second.parameters["equal_texts"]) == (None, rule)
    if index == "exact":
        assert (after == brute_force(world.scores("queries"), excluded(world, "queries"), 10)).all()


def test_workers_blocks_and_groups_change_no_byte(tmp_path):
    world = planted(str(tmp_path), shards=3)
    tables = []
    for number, flags in enumerate(([], ["--direct_num_workers=2", "--direct_running_mode=multi_threading"])):
        options = MineOptions(index="exact", block_rows=90, query_batch=64, out=str(tmp_path / f"out-{number}"))
        options = apart(world, options) if number else options
        mine(world.data, world.run, options=options, beam_options=flags)
        tables.append(shards(join(str(tmp_path / f"out-{number}"), "queries")))
    assert len(tables[0]) == 3
    assert tables[0] == tables[1]


def test_without_equal_texts_a_table_is_as_it_was(tmp_path):
    world = random_world(str(tmp_path), rows=40, labels=30, dimension=4, texts=["", *(f"label {i}" for i in range(29))])
    world.texts[1] = ""  # type: ignore[index]
    world.write_dump()
    bytes_of = [(table(world, equal_texts=rule), shards(f"{world.run}-out/queries")) for rule in ("off", "equal")]
    assert bytes_of[0][1] == bytes_of[1][1]
    assert bytes_of[0][0][1].digest == bytes_of[1][0][1].digest
