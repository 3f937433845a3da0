"""The whole loop by its commands, small: what each reads and makes below two folders."""

from pathlib import Path

from tests.command import call, sets
from tests.pipelines.raw import write_tate

SHARD = ("--tokenizer", "train:400", "--shards", "2", "--row-group-rows", "64", "--validation", "0.2")
TRAIN = sets("train.epochs=3", "order.batch=64", "logging.tensorboard=false")
UNSTABLE = ("spent.json", "metrics.jsonl")  # what a clock measured

# Arguments, what it makes inside of a run, and what it makes.
COMMANDS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "shard": (("shard", "{root}/raw", "{out}/data", *SHARD), "", "data/"),
    "train": (("train", "astra", "{root}/data", "{out}/run", *TRAIN), "", "run/checkpoints/"),
    "mine": (("mine", "{root}/data", "{out}/run", "--for-epoch", "2"), "negatives/", "run/negatives/"),
    "embed": (("embed", "{root}/data", "{root}/run", "{out}/vectors"), "", "vectors/"),
    "fuse": (("fuse", "{root}/data", "{out}/run"), "fusion/", "run/fusion/"),
    "evaluate": (("evaluate", "{root}/data", "{root}/run", "--json"), "", ""),
    "export": (("export", "{root}/data", "{root}/run", "{out}/export"), "", "export/"),
    "predict": (("predict", "{root}/export", "{root}/texts.jsonl", "{out}/predicted.jsonl"), "", "predicted.jsonl"),
}


def make(folder: Path) -> None:
    """Run every command below `folder`/local; write what `evaluate` says beside it."""
    local = folder / "local"
    write_tate(local / "raw", 300, 40)
    (local / "texts.jsonl").write_text('{"key": "a", "text": "a landscape"}\n{"key": "b", "text": "a man"}\n')
    for name in COMMANDS:
        done = call(*arguments(name, str(local), str(local)))
        assert done.status == 0, done.err
        if name == "evaluate":
            (folder / "said.json").write_text(done.out.splitlines()[-1])


def arguments(name: str, root: str, out: str) -> list[str]:
    return [argument.format(root=root, out=out) for argument in COMMANDS[name][0]]


def files(folder: Path) -> dict[str, bytes]:
    """Content by name of what lies below a folder, or of the file."""
    paths = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.name not in UNSTABLE}
