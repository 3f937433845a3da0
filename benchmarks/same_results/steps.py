"""Steps for both checkouts: commands of `extremis`; all outputs go into a folder with the step's name."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

VOCABULARY = 2000
SIZES = {"full": (3000, 800, 4000), "quick": (1500, 400, 2000)}  # train points, test points, labels

SHARD = ("--tokenizer", f"train:{VOCABULARY}", "--shards", "3", "--row-group-rows", "128", "--json")
PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")

# Settings for training in seconds on one thread. A run waits for its tables, so results do not depend on timing.
SMALL = (
    *("train.threads=1", "train.epochs=4", "checkpoint.every_epochs=1", "logging.every_steps=1"),
    *("logging.tensorboard=false", "order.batch=512", "order.streams=4"),
)
BAG = ("encoder.dimension=32", "encoder.hidden=64", "encoder.buckets=4096")
RANDOM = ("negatives.random=128",)
TABLES = ("refresh.stale=wait", "refresh.start=2", "refresh.every=1")
MINED = (*RANDOM, "negatives.hard=20", *TABLES)


@dataclass(frozen=True)
class Step:
    """Commands in order, and the steps whose outputs the commands read."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...] = ("data",)
    quick: bool = True


def steps() -> list[Step]:
    """Return all steps; a step comes after the steps whose outputs it reads."""
    return [*sharding(), *training(), *reading()]


def select(quick: bool, names: Sequence[str]) -> list[Step]:
    """Return the steps of a quick or a full comparison, or the steps `names` with all steps that these need."""
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
    """Train recipes, with a miner beside the trainer, and evaluate each run."""
    validated = "validation.split=val"
    warmup = ("negatives.hard=50", "negatives.warmup=128", *TABLES)
    second = ("train.encoder_from=ngame/run", "order.batch=256", *BAG)
    fixed = ("order.cluster=32", "order.cluster_doubles_every=0")
    bert = ("encoder.kind=transformer", "encoder.model=inputs/bert", "encoder.dimension=16", "encoder.max_tokens=16")
    plain = (*BAG, *RANDOM, "data.label_texts=false")
    return [
        then(recipe("astra", *BAG, *MINED, validated), ("inspect", "astra/run", "--verify", "--json")),
        recipe("random", *plain),
        recipe("w-hard", *BAG, *warmup, quick=False),
        recipe("theta-hard", *BAG, *warmup, quick=False),
        recipe("curriculum", *BAG, *MINED, quick=False),
        then(recipe("decoupled", *BAG, *MINED, validated), evaluate("data", "decoupled", "--scores", "sum")),
        recipe("renee", *BAG, quick=False),
        recipe("dexml", *BAG, quick=False),
        recipe("dexml-sampled", *BAG, *TABLES),
        recipe("ngame", *BAG, *TABLES, "order.cluster=16", "order.cluster_doubles_every=1"),
        recipe("ance", *BAG, *TABLES, "negatives.width=20", quick=False),
        then(recipe("ngame-m2", *second, *fixed, needs=("data", "ngame"), quick=False), *fused("ngame-m2")),
        recipe("decoupled-m2", *second, *RANDOM, *TABLES, needs=("data", "ngame"), quick=False),
        recipe("lns", *BAG, *RANDOM, "negatives.lsh.hard=50", "negatives.lsh.tables=10"),
        recipe("mips-s", *BAG, *RANDOM, "refresh.every_steps=20", quick=False),
        recipe("in-trainer", *BAG, *MINED[:2], "refresh.every_steps=20"),
        recipe("half", *BAG, *MINED, "classifier.dtype=bfloat16", base="astra", quick=False),
        recipe("transformer", *bert, *RANDOM, "data.label_texts=false", base="random", quick=False),
        recipe("features", *plain, *MINED, "encoder.inputs=features", base="astra", data="sparse", quick=False),
        recipe("tars", *plain, base="random", data="webdataset", quick=False),
        replace(on_ranks(recipe("ranks", *BAG, *MINED, base="astra")), quick=False),
    ]


def reading() -> list[Step]:
    """Run the commands that read a trained run: miners, clusters, embeddings, exports and predictions."""
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
                (*predict, "export/test.trec", "--max-labels", "5", "--no-filter"),
                (*predict, "export/test.npz", "--max-labels", "20"),
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
    needs: tuple[str, ...] = (),
    quick: bool = True,
) -> Step:
    """Return the step that trains recipe `base` (default: `name`) on the step `data`, and evaluates the run."""
    options = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    train = ("run", base or name, f"{data}/out", f"{name}/run", "--json", *options)
    return Step(name, (train, evaluate(data, name)), needs or (data,), quick)


def evaluate(data: str, name: str, *options: str) -> tuple[str, ...]:
    return "evaluate", f"{data}/out", f"{name}/run", "--k", "20", "--zero-shot", "--json", *options


def then(step: Step, *commands: tuple[str, ...]) -> Step:
    """Return the step with more commands at its end."""
    return replace(step, commands=(*step.commands, *commands))


def on_ranks(step: Step) -> Step:
    """Return the step with its first command under `torchrun`."""
    first, *others = step.commands
    return replace(step, commands=(("torchrun", *first), *others))


def fused(name: str) -> tuple[tuple[str, ...], ...]:
    """Return the commands that fuse a run's scores, and evaluate and export the run."""
    data, run = "data/out", f"{name}/run"
    return (
        ("fuse", data, run, "--shortlist", "20", "--json"),
        evaluate("data", name, "--scores", "fused"),
        ("export", data, run, f"{name}/export", "--scores", "fused", "--json"),
        ("predict", f"{name}/export", "--data", data, f"{name}/fused.jsonl", "--json"),
    )
