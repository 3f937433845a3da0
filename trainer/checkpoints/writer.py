"""Each rank writes its part of a checkpoint in the background, while training continues to change rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from schemas import storage
from schemas.layout import RunLayout
from schemas.manifest import Manifest, publish, unpublish
from schemas.owners.claim import Claim, Unclaimed
from trainer.checkpoints.background import BackgroundWriter, ReadRows, Tensors
from trainer.checkpoints.checkpoint import drop_old_checkpoints, row_ranges, write_rows, write_tensors
from trainer.group import ALONE, Group
from trainer.stream.transfer import copy_before_change

WaitForCopy = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class CheckpointContents:
    """Contents of the checkpoint of global step `step`, on one rank.

    `tensors`: tensors per file, the same on every rank; rank 0 writes the files. `rows`: tensors [n, ...] for this
    rank's range [first, first + n) of the labels [0, `labels`). `best`: the step of the best checkpoint, which is never
    removed.
    """

    step: int
    tensors: Mapping[str, Tensors]
    rows: Tensors
    first: int
    labels: int
    state: Mapping[str, Any]
    parents: Mapping[str, str]
    best: int | None = None


class CheckpointWriter(BackgroundWriter):
    """Writes one checkpoint at a time and retains the newest `keep` checkpoints.

    In the background, the writer writes the state at the time of the call to `save`: rank 0 copies the tensors, and
    each rank copies rows before they change. Memory: the tensors, a snapshot's memory and the rows of one file
    (FILE_BYTES), never all rows. In the foreground, the writer copies nothing. Rank 0 holds the `claim` on the run.
    """

    def __init__(
        self, run: RunLayout, keep: int = 2, background: bool = True, group: Group = ALONE, claim: Claim | None = None
    ) -> None:
        super().__init__(f"checkpoints and dumps of {run.root}", background, group)
        self._claim, self._run, self._keep = claim or Unclaimed(), run, keep

    def save(self, contents: CheckpointContents) -> None:
        """Start to write a checkpoint, after all earlier checkpoints; all ranks call `save`.

        Raises the StorageError of an earlier checkpoint or of this checkpoint.
        """
        if self.background:
            self.wait_for_other_steps(contents.step)
            files = contents.tensors.items() if self.group.first else ()
            copies = {
                name: {key: copy_before_change(value.detach()) for key, value in tensors.items()}
                for name, tensors in files
            }
            self.begin(contents.step, contents.rows, partial(self._write_copies, contents, copies))
            return
        self.begin(contents.step, contents.rows, partial(self._write, contents))

    def _write_copies(
        self, contents: CheckpointContents, copies: Mapping[str, Mapping[str, WaitForCopy]], read: ReadRows
    ) -> None:
        tensors = {name: {key: wait() for key, wait in waits.items()} for name, waits in copies.items()}
        self._write(replace(contents, tensors=tensors), read)

    def _write(self, contents: CheckpointContents, read: ReadRows) -> None:
        url, group = self._run.checkpoint(contents.step), self.group
        if group.first:
            self._claim.require()
            # An earlier attempt may have left files, with different label ranges.
            unpublish(url)
            storage.remove(url, recursive=True)
        group.barrier()
        shards = (
            [write_tensors(url, name, tensors) for name, tensors in contents.tensors.items()] if group.first else []
        )
        rows, first = contents.rows, contents.first
        count = len(next(iter(rows.values()), ()))  # none if labels are encoded
        row_bytes = sum(value[:1].numel() * value.element_size() for value in rows.values())
        shards += [
            write_rows(url, start, read(start - first, stop - first))
            for start, stop in row_ranges(first, first + count, row_bytes)
        ]
        by_rank = group.all_gather_objects(shards)
        if group.first:
            manifest = Manifest(
                kind="checkpoint",
                shards=tuple(shard for shards in by_rank for shard in shards),  # shards of rows are ascending by label
                rows=contents.labels,
                id_range=(0, contents.labels),
                parameters=dict(contents.state),
                parents=dict(contents.parents),
            )
            self._claim.require()
            publish(url, manifest)
            drop_old_checkpoints(self._run, self._keep, contents.best)
