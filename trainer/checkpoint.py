"""Checkpoints: safetensors files by label range and a manifest with the state, whole or not there. No pickle."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save

from schemas import storage
from schemas.layout import RunLayout, parse_number
from schemas.manifest import Manifest, Shard, check_shard, is_published, open_manifest, publish, unpublish
from schemas.storage import join

ROWS_A_FILE = 1 << 22


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint; `state` is what the loop needs to go on."""

    url: str
    manifest: Manifest

    @classmethod
    def open(cls, url: str) -> "Checkpoint":
        """Raises TableError when there is none, or it is damaged."""
        return cls(url, open_manifest(url, "checkpoint"))

    @property
    def state(self) -> dict[str, Any]:
        return self.manifest.parameters

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of one part (`encoder`, `encoder-optimizer`). Raises TableError."""
        return _read(self.url, next(shard for shard in self.manifest.shards if shard.path == f"{name}.safetensors"))

    def vectors(self, name: str) -> torch.Tensor:
        """The classifier's `weight` or an optimizer's state, label ranges laid end to end. Raises TableError."""
        parts = [shard for shard in self.manifest.shards if shard.path.startswith("vectors-")]
        return torch.cat([_read(self.url, shard)[name] for shard in parts])


def save_checkpoint(
    url: str,
    parts: Mapping[str, Mapping[str, torch.Tensor]],
    vectors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    parents: Mapping[str, str],
) -> Manifest:
    """Publish tensors by part, the classifier's rows by label range, and the JSON `state`. Raises StorageError."""
    unpublish(url)
    shards = [_write(url, f"{name}.safetensors", 0, tensors) for name, tensors in parts.items()]
    labels = len(vectors["weight"])
    count = max(1, -(-labels // ROWS_A_FILE))
    for index in range(count):
        rows = slice(index * ROWS_A_FILE, min((index + 1) * ROWS_A_FILE, labels))
        ranges = {name: value[rows] for name, value in vectors.items()}
        shards.append(_write(url, f"vectors-{index:05d}-of-{count:05d}.safetensors", rows.stop - rows.start, ranges))
    manifest = Manifest(
        kind="checkpoint",
        shards=tuple(shards),
        rows=labels,
        id_range=(0, labels),
        parameters=dict(state),
        parents=dict(parents),
    )
    return publish(url, manifest)


def latest_checkpoint(run: RunLayout) -> Checkpoint | None:
    """The newest finished checkpoint of a run, or None."""
    steps = sorted((n for n in map(parse_number, storage.list_names(run.checkpoints)) if n is not None), reverse=True)
    for step in steps:
        if is_published(run.checkpoint(step)):
            return Checkpoint.open(run.checkpoint(step))
    return None


def drop_old_checkpoints(run: RunLayout, keep: int, spare: int | None = None) -> None:
    """Remove all but the newest `keep` finished checkpoints, and the one of step `spare` (the best)."""
    steps = sorted(n for n in map(parse_number, storage.list_names(run.checkpoints)) if n is not None)
    kept = {*[step for step in steps if is_published(run.checkpoint(step))][-keep:], spare}
    for step in steps:
        if step not in kept:
            unpublish(run.checkpoint(step))
            storage.remove(run.checkpoint(step), recursive=True)


def _write(url: str, name: str, rows: int, tensors: Mapping[str, torch.Tensor]) -> Shard:
    data = save({key: value.detach().contiguous() for key, value in tensors.items()})
    storage.write_bytes(join(url, name), data)
    return Shard(path=name, rows=rows, bytes=len(data), sha256=storage.sha256(data))


def _read(url: str, shard: Shard) -> dict[str, torch.Tensor]:
    remedy = f"Remove {url} to go on from the checkpoint before it."
    return load(check_shard(join(url, shard.path), shard, remedy))
