"""Paths below DATA (written once) and RUN (one training run); only this module builds and parses these paths."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from schemas import LABEL_TEXTS as LABEL_TEXTS
from schemas import storage
from schemas.errors import InputError
from schemas.storage import join

MANIFEST = "_manifest.json"  # readers of Parquet folders skip files that begin with `_`
RUN_FILE = "config.toml"  # the recipe and the facts of a run, in its folder
MEMORY = "memory.json"  # in RUN, or the OUT of mining: the default memory that tables are planned for
MINING_COST = "spent.json"  # in the folder of a refresh's tables: the cost of mining
# Files of `extremis ablate`: the result of one run in its RUN; the results of all runs, and the page, in OUT.
ABLATION_RESULT, ABLATION_PAGE = "ablation.json", "ablation.md"
BESIDE_TABLES = MEMORY, MINING_COST, ABLATION_RESULT  # in folders of tables, and in failed runs
# Parameter of a queries table in cluster order, and folder of these tables in a run.
CLUSTERS = "clusters"
_NUMBERED = re.compile(r"(epoch|step)-(-?\d+)")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def shard_name(index: int, count: int, extension: str = "parquet") -> str:
    """Return `part-00007-of-00064.parquet` for shard `index` in [0, count)."""
    return f"part-{index:05d}-of-{count:05d}.{extension}"


def staging(url: str) -> str:
    """Return the prefix of files that are needed only while the table at `url` is being built."""
    return join(url, ".staging")


def phases(url: str) -> str:
    """Return the prefix, in staging, of the output of finished phases, which a resumed command reuses."""
    return join(staging(url), "phases")


def find_tokenizer(folder: Path) -> Path | None:
    """Find the tokenizer file in a model's directory or in a subfolder, also under the name that WordLlama uses."""
    patterns = ("tokenizer.json", "*/tokenizer.json", "tokenizers/*.json")
    return next((place for pattern in patterns for place in sorted(folder.glob(pattern))), None)


def parse_number(name: str) -> int | None:
    """Return the epoch or step of a folder name (`epoch-0008` is 8); None for any other name."""
    match = _NUMBERED.fullmatch(name)
    return int(match[2]) if match else None


def epoch_folder(root: str, epoch: int) -> str:
    """Return the folder of `epoch` under `root`."""
    return join(root, f"epoch-{epoch:04d}")


def list_numbers(root: str) -> list[int]:
    """List the epochs or steps that have a folder under `root`, ascending. Raises StorageError."""
    numbers = (parse_number(name) for name in storage.list_names(root))
    return sorted(number for number in numbers if number is not None)


def parts_prefix(part: str) -> str:
    """Return the path, relative to a version, of the tables with the part that the version adds."""
    return f"parts/{check_folder(part)}"


def source_of_part(source: str, part: str) -> str:
    """Return the name that a run uses for the source that contains the rows of one part."""
    return f"{source}-{part}"


def check_name(what: str, name: str) -> str:
    """Return `name`, the new name of a folder or a part, if it is allowed. Raises InputError.

    Existing names, which earlier versions allowed, are checked by `check_folder` instead.
    """
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{what} {name[:60]!r}: a name consists of 1 to 128 of the characters a-z, A-Z, 0-9, `.`, `_` and `-`, and "
            "does not begin with a dot. Choose another name."
        )
    return name


def check_folder(name: str) -> str:
    """Return `name`, perhaps from a manifest, if it names a single folder. Raises InputError for any other path."""
    if not name or name.startswith(".") or set(name) & set("/\\:"):
        raise InputError(f"{name!r} cannot name a split or a source: the path would lead out of the folder.")
    return name


class _Subpath:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layout: "DataLayout | RunLayout", owner: type | None = None) -> str:
        return join(layout.root, self._name)


@dataclass(frozen=True)
class DataLayout:
    """Paths below DATA, the folder that `extremis shard` writes; its subfolders are FOLDERS."""

    FOLDERS: ClassVar = ("queries", "labels", "tokenizer", "rejects", "parts")

    root: str

    labels = _Subpath("labels")
    tokenizer = _Subpath("tokenizer")
    rejects = _Subpath("rejects")

    def queries(self, split: str) -> str:
        return join(self.root, "queries", check_folder(split))


@dataclass(frozen=True)
class RunLayout:
    """Paths below RUN, the prefix of one training run."""

    root: str

    config = _Subpath(RUN_FILE)
    checkpoints = _Subpath("checkpoints")
    dumps = _Subpath("dumps")
    negatives_root = _Subpath("negatives")
    clusters_root = _Subpath(CLUSTERS)
    adoptions = _Subpath("adoptions")
    metrics = _Subpath("metrics.jsonl")
    log = _Subpath("run.log")
    tensorboard = _Subpath("tensorboard")
    services = _Subpath("services.json")  # the ids of this run in tracking services
    evaluations = _Subpath("evaluations")
    finished = _Subpath("finished.json")
    commands = _Subpath("commands.json")  # the command lines that made the run
    fusions = _Subpath("fusion")

    def checkpoint(self, step: int) -> str:
        return join(self.checkpoints, f"step-{step:08d}")

    def evaluation(self, split: str, step: int, on: str | None = None) -> str:
        """Metrics of the checkpoint at `step` over all queries of `split`, as written by `extremis evaluate`.

        `on`: digest of the evaluated data, if the data set is a later version than the data of the run.
        """
        return join(self.evaluations_on(on), f"{check_folder(split)}-step-{step:08d}.json")

    def evaluations_on(self, digest: str | None) -> str:
        """Folder of the evaluations on the run's own data (`digest` None), or on the later version with this digest."""
        return self.evaluations if digest is None else join(self.evaluations, f"on-{digest[:16]}")

    def fusion(self, step: int) -> str:
        """Fusion of scores that `extremis fuse` fitted to the checkpoint at `step`."""
        return join(self.fusions, f"step-{step:08d}")

    def scored_step(self, step: int | str | None = None) -> int | str | None:
        """Return `step`; None: the newest step with a fusion, or None if there is none (`open_step` takes the best)."""
        return max(list_numbers(self.fusions), default=None) if step is None else step

    def dump(self, epoch: int) -> str:
        """The dump written during `epoch`: embeddings of each source, and the vectors at the end of the epoch."""
        return epoch_folder(self.dumps, epoch)

    def embeddings(self, epoch: int, source: str) -> str:
        return join(self.dump(epoch), check_folder(source))

    def vectors(self, epoch: int) -> str:
        return join(self.dump(epoch), "vectors")

    def parts(self, epoch: int) -> str:
        """Embeddings of an unfinished epoch, which are saved with each checkpoint so that a resumed run loses none."""
        return join(self.dump(epoch), ".parts")

    def negatives(self, epoch: int, source: str) -> str:
        """The table of negatives for `source` (`queries` or `labels`) that training uses from `epoch` on."""
        return join(epoch_folder(self.negatives_root, epoch), check_folder(source))

    def clusters(self, epoch: int, source: str) -> str:
        """The rows of `source` in cluster order, which training uses from `epoch` on."""
        return join(epoch_folder(self.clusters_root, epoch), check_folder(source))

    def adoption(self, epoch: int) -> str:
        """The decision about the table that `epoch` trains on, made once, before the first step of the epoch."""
        return join(self.adoptions, f"epoch-{epoch:04d}.json")
