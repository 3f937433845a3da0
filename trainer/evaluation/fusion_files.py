"""Files of a run's fusion: published for the checkpoint that the fusion was fitted to, and opened for evaluation."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from schemas.errors import InputError, TableError
from schemas.layout import DataLayout, RunLayout, list_numbers
from schemas.manifest import Manifest, is_published, read_shard, write_file
from schemas.owners.build import building
from schemas.storage import join
from schemas.table import Table
from trainer.checkpoints.checkpoint import Checkpoint
from trainer.evaluation.fusion import Fusion, FusionWeights, Reranker, Scorers
from trainer.evaluation.memory import Memory
from trainer.evaluation.ranking import embed_label_texts
from trainer.evaluation.split import HOLDOUT, label_statistics
from trainer.evaluation.tree import FusionTree
from trainer.group import ALONE, Group
from trainer.linear.ranker import TRAINED_FILE, LinearRanker
from trainer.model import Model

KIND, TREE, WEIGHTS = "fusion", "tree.json", "weights.json"


class RunFusion(NamedTuple):
    """Fusion for a run's checkpoint, and the table with the fusion's files."""

    fusion: Fusion
    table: Table

    @property
    def shortlist(self) -> int:
        """Number of the classifier's best labels that are reranked."""
        return int(self.table.parameters["shortlist"])

    def memory(self, split: str | None = None) -> Memory | None:
        """Read the memory, if there is one; for `split`, only the points that may vote. Raises TableError.

        If `split` is the held-out rows, held-out points are excluded, because each row would find itself.
        """
        return Memory.read(self.table, trained_only=split == HOLDOUT)

    def ranker(self, split: str | None = None) -> LinearRanker | None:
        """Read the linear ranker, if there is one; for `split`, a ranker that was not fitted to `split`."""
        unseen = LinearRanker.read(self.table, TRAINED_FILE) if split == HOLDOUT else None
        return unseen or LinearRanker.read(self.table)


def publish_fusion(
    data: str,
    run: str,
    checkpoint: Checkpoint,
    file: tuple[str, bytes],
    facts: dict[str, Any],
    memory: Memory | None = None,
    linear: Mapping[str, LinearRanker] | None = None,
) -> Manifest:
    """Publish a fusion's `file` (name, content), a memory, and rankers by file name; replaces an earlier fusion."""
    url, (name, body) = RunLayout(run).fusion(checkpoint.step), file
    with building(url, "fitted") as build:
        return build.publish(
            Manifest(
                kind=KIND,
                shards=(
                    write_file(build.url, name, body),
                    *(memory.write(build.url) if memory else ()),
                    *(ranker.write(build.url, name) for name, ranker in (linear or {}).items()),
                ),
                parents={"data": Table.open(data, "data").digest, "checkpoint": checkpoint.table.digest},
                parameters=facts,
            )
        )


def open_fused(data: str, run: str, checkpoint: Checkpoint, model: Model, split: str, group: Group = ALONE) -> Reranker:
    """Open the fusion for `checkpoint`, for the rank's labels and the queries of `split`.

    Raises InputError if there is no fusion. Raises TableError.
    """
    opened = group.decide(lambda: open_fusion(data, run, checkpoint))
    layout = DataLayout(data)
    texts = embed_label_texts(model, layout) if opened.fusion.reads_texts else None
    frequency = label_statistics(layout).frequency
    memory = opened.memory(split)
    scorers = Scorers(texts, memory and memory.to(model.device), opened.ranker(split))
    return Reranker(opened.fusion, scorers, frequency, opened.shortlist)


def scored_step(run: RunLayout, step: int | str | None = None) -> int | str | None:
    """Return `step`, by default the newest step with a fusion; None without a fusion: `open_step` takes the best."""
    return max(list_numbers(run.fusions), default=None) if step is None else step


def scores_of(run: str, step: int) -> Literal["fused", "classifier"]:
    """Return the name of a checkpoint's default scores: "fused" if the checkpoint has a fusion."""
    return "fused" if is_published(RunLayout(run).fusion(step)) else "classifier"


def open_fusion(data: str, run: str, checkpoint: Checkpoint) -> RunFusion:
    """Open the fusion that `extremis fuse` fitted to `checkpoint`. Raises InputError without a fusion; TableError."""
    url, step = RunLayout(run).fusion(checkpoint.step), checkpoint.step
    if not is_published(url):
        raise InputError(f"{run}: step {step:,} has no fusion. Fit a fusion with `extremis fuse {data} {run}`.")
    table = Table.open(url, KIND)
    if table.parents["checkpoint"] != checkpoint.table.digest:
        raise InputError(
            f"{url}: the checkpoint of step {step:,} has changed since this fusion was fitted. Fit the fusion again "
            f"with `extremis fuse {data} {run}`."
        )
    file = next((shard for shard in table.shards if shard.path in (TREE, WEIGHTS)), None)
    if file is None:
        raise TableError(f"{url}: contains neither {TREE} nor {WEIGHTS}. Fit the fusion again.")
    parse = FusionWeights.parse if file.path == WEIGHTS else FusionTree.parse
    return RunFusion(parse(read_shard(url, file, "Fit the fusion again."), join(url, file.path)), table)
