"""Steps that both checkouts run: commands of `extremis` whose outputs all go into a folder of the step's name."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

VOCABULARY = 2000
SIZES = {"full": (6000, 1500, 15562), "quick": (1500, 400, 2000)}  # train points, test points, labels

# A recipe that trains in seconds, on one thread, and waits for its tables: timing decides nothing.
SMALL = (
    *("train.threads=1", "train.epochs=4", "refresh.stale=wait", "logging.every_steps=1", "logging.tensorboard=false"),
    *("encoder.dimension=32", "encoder.hidden=64", "encoder.buckets=4096", "negatives.random=128"),
    *("order.batch=512", "order.streams=4", "checkpoint.every_epochs=1"),
)
TABLES = ("refresh.start=2", "refresh.every=1")
SHARD = ("--tokenizer", f"train:{VOCABULARY}", "--shards", "3", "--row-group-rows", "128", "--json")
PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")


@dataclass(frozen=True)
class Step:
    """Commands in order, and the steps whose outputs they read."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...] = ("data",)
    quick: bool = True


def steps() -> list[Step]:
    """Return every step; one that reads another's outputs comes after it."""
    return [*sharding(), *training(), *reading()]


def select(quick: bool, names: Sequence[str]) -> list[Step]:
    """Return the steps of a quick or a full comparison, or those of `names` with all that they need."""
    if not names:
        return [step for step in steps() if step.quick or not quick]
    selected = set(names)
    for step in reversed(steps()):
        if step.name in selected:
            selected.update(step.needs)
    return [step for step in steps() if step.name in selected]


def sharding() -> list[Step]:
    """Shard each input form and each kind of file."""
    xc = ("shard", "inputs/xc")
    return [
        Step(
            "data",
            (
                (*xc, "data/out", *SHARD, "--propensity", "0.55,1.5", "--validation", "0.1", "--keep-text"),
                ("inspect", "data/out", "--verify", "--json"),
            ),
            (),
        ),
        Step("webdataset", ((*xc, "webdataset/out", *SHARD, "--sink", "webdataset"),), ()),
        Step("processes", ((*xc, "processes/out", *SHARD, "--", *PROCESSES),), (), quick=False),
        Step("title", ((*xc, "title/out", *SHARD, "--text", "title", "--seed", "7"),), (), quick=False),
        Step("keyed", (("shard", "inputs/jsonl", "keyed/out", *SHARD, "--max-reject-share", "0.01"),), ()),
        Step("beir", (("shard", "inputs/beir", "beir/out", *SHARD),), (), quick=False),
        Step("sparse", (("shard", "inputs/sparse", "sparse/out", *SHARD),), ()),
    ]


def training() -> list[Step]:
    """Train recipes, with a miner beside, and evaluate each run."""
    hardness = ("negatives.hard=20", *TABLES, "validation.split=val")
    clusters = ("order.cluster=16", "order.cluster_doubles_every=1", *TABLES)
    labels = ("order.batch=1024", "train.epochs=3", "encoder.dimension=16", "encoder.hidden=16")
    second = ("train.encoder_from=ngame/run", "order.batch=256")
    fixed = ("order.cluster=32", "order.cluster_doubles_every=0")
    bert = ("encoder.kind=transformer", "encoder.model=inputs/bert", "encoder.lr=0.001", "encoder.max_tokens=16")
    features = ("encoder.inputs=features", "data.label_texts=false", *TABLES)
    return [
        then(recipe("astra", *hardness), ("inspect", "astra/run", "--verify", "--json")),
        recipe("random", "data.label_texts=false"),
        recipe("w-hard", "negatives.hard=50", "negatives.warmup=128", *TABLES, quick=False),
        recipe("theta-hard", "negatives.hard=50", "negatives.warmup=128", *TABLES, quick=False),
        recipe("curriculum", "negatives.hard=20", *TABLES, quick=False),
        recipe("decoupled", *hardness, scores="sum"),
        recipe("renee", quick=False),
        recipe("dexml", *labels, quick=False),
        recipe("dexml-sampled", *labels, *TABLES),
        recipe("ngame", *clusters),
        recipe("ance", *TABLES, "negatives.width=20", quick=False),
        then(recipe("ngame-m2", *second, *fixed, needs=("data", "ngame"), quick=False), *fused("ngame-m2")),
        recipe("decoupled-m2", *second, *TABLES, needs=("data", "ngame"), quick=False),
        recipe("lns", "negatives.lsh.hard=50", "negatives.lsh.tables=10"),
        recipe("mips-s", "refresh.every_steps=20", quick=False),
        recipe("in-trainer", "refresh.every_steps=20"),
        recipe("half", "classifier.dtype=float16", *hardness, base="astra", quick=False),
        recipe("transformer", *bert, "data.label_texts=false", "negatives.hard=0", base="astra", quick=False),
        recipe("features", *features, base="astra", data="sparse", quick=False),
        recipe("tars", "data.label_texts=false", base="random", data="webdataset", quick=False),
        recipe("ranks", *hardness, base="astra", verb=("torchrun", "run"), quick=False),
    ]


def reading() -> list[Step]:
    """Run what reads a trained run: miners, clusters, embeddings, exports and predictions."""
    mine = ("mine", "data/out", "astra/run", "--json", "--overwrite", "--out")
    inverted = ("--index", "IVF32,Flat", "--threads", "1", "--block-rows", "1000")
    embed = ("embed", "data/out", "astra/run")
    cluster = ("cluster", "data/out", "astra/run")
    predict = ("predict", "export/out", "--data", "data/out", "--json")
    return [
        Step("mine-exact", ((*mine, "mine-exact/out", "--index", "exact"),), ("data", "astra")),
        Step("mine-inverted", ((*mine, "mine-inverted/out", *inverted, "--ranges", "2"),), ("data", "astra")),
        Step(
            "mine-window",
            ((*mine, "mine-window/out", "--by", "labels", "--skip-top", "5", "--relative-margin", "0.05"),),
            ("data", "astra"),
            quick=False,
        ),
        Step(
            "embed",
            (
                (*embed, "embed/queries", "--split", "test", "--json"),
                (*embed, "embed/labels", "--what", "labels", "--dtype", "float32", "--json"),
            ),
            ("data", "astra"),
        ),
        Step("cluster", ((*cluster, "--out", "cluster/out", "--size", "16", "--json"),), ("data", "astra")),
        Step(
            "export",
            (
                ("export", "data/out", "astra/run", "export/out", "--json"),
                (*predict, "export/test.jsonl"),
                (*predict, "export/test.trec", "--k", "5", "--no-filter"),
                (*predict, "export/test.npz", "--k", "20"),
                ("predict", "export/out", "inputs/jsonl/test.jsonl", "export/texts.parquet", "--json"),
                ("export", "data/out", "astra/run", "export/index", "--index", "IVF16,Flat", "--json"),
                ("predict", "export/index", "inputs/jsonl/test.jsonl", "export/index.jsonl", "--json"),
            ),
            ("data", "astra"),
        ),
    ]


def recipe(
    name: str,
    *settings: str,
    base: str = "",
    data: str = "data",
    scores: str = "classifier",
    needs: tuple[str, ...] = (),
    verb: tuple[str, ...] = ("run",),
    quick: bool = True,
) -> Step:
    """Return the step that trains recipe `base` (default: `name`) on the step `data` and evaluates the run."""
    options = tuple(word for setting in (*SMALL, *settings) for word in ("--set", setting))
    train = (*verb, base or name, f"{data}/out", f"{name}/run", "--json", *options)
    evaluate = ("evaluate", f"{data}/out", f"{name}/run", "--k", "20", "--scores", scores, "--zero-shot", "--json")
    return Step(name, (train, evaluate), needs or (data,), quick)


def then(step: Step, *commands: tuple[str, ...]) -> Step:
    """Return the step with more commands at its end."""
    return replace(step, commands=(*step.commands, *commands))


def fused(name: str) -> tuple[tuple[str, ...], ...]:
    """Return the commands that fuse a run's scores, evaluate and export them."""
    data, run = "data/out", f"{name}/run"
    return (
        ("fuse", data, run, "--shortlist", "20", "--json"),
        ("evaluate", data, run, "--scores", "fused", "--json"),
        ("export", data, run, f"{name}/export", "--scores", "fused", "--json"),
        ("predict", f"{name}/export", "--data", data, f"{name}/fused.jsonl", "--json"),
    )
