"""Section `data`: the rows that a run trains on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from schemas import LABEL_TEXTS
from schemas.options import Options
from trainer.schedule import MOST_WEIGHT

if TYPE_CHECKING:
    from trainer.stream.sources import RowShare

_RESERVED = {"queries", "vectors"}  # the source without a mix; what lies beside the sources' embeddings in a dump


class Data(Options):
    """Rows that a run trains on."""

    split: str = Field("train", description="split to train on")
    holdout: float = Field(
        0.0, ge=0, le=0.5, description="share of the split's rows that are left out of training, as split `holdout`"
    )
    share: float = Field(1.0, gt=0, le=1, description="share of the split's rows to train on, of those not left out")
    parts: str | list[str] = Field(
        "", description="of a version of data, the parts to train on: `last N`, a pattern such as 2026-11-*, or a list"
    )
    half_life: float = Field(
        0.0, ge=0, description="of a version, parts after which a row is dealt half as often, the newest once; 0: none"
    )
    replay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="with train.start_from, how often an epoch deals a row that the earlier run had; new ones once",
    )
    label_texts: bool = Field(False, description="label texts are training points too, each with its own label")
    mix: dict[str, Annotated[float, Field(gt=0, le=MOST_WEIGHT)]] = Field(
        default_factory=dict,
        description="in place of split and label_texts, how often an epoch deals each row of the splits named; "
        "`labels` are the label texts. A weight of 1.5 deals all rows once and half of them once more",
    )

    @property
    def trained(self) -> RowShare:
        """Rows of `split` to train on."""
        from trainer.stream.sources import RowShare  # the stream needs torch

        return RowShare(0.0, min(self.share, 1 - self.holdout))

    @property
    def held_out(self) -> RowShare:
        """Rows of `split` that are left out."""
        from trainer.stream.sources import RowShare

        return RowShare(1 - self.holdout, 1.0)

    @property
    def by_parts(self) -> bool:
        """True: rows are dealt by the part of a version that they are in."""
        return bool(self.parts or self.half_life or self.replay < 1)

    @model_validator(mode="after")
    def _check(self) -> Data:
        if self.by_parts and (self.mix or self.holdout or self.share < 1):
            raise ValueError(
                "data.parts, data.half_life and data.replay choose rows of one split by their parts: leave out "
                "data.mix, data.holdout and data.share"
            )
        if not self.mix:
            return self
        if self.holdout or self.share < 1:
            raise ValueError(
                "data.holdout and data.share are of one split: leave them out, or leave out data.mix (a weight in "
                "data.mix below 1 deals a part of a split in each epoch)"
            )
        for name in _RESERVED & self.mix.keys():
            raise ValueError(f"data.mix.{name}: a source of this name cannot be mixed; give the split another name")
        if self.split not in ("train", *self.mix):
            raise ValueError(
                f"data.split = {self.split!r} is not in data.mix, which names every source: add {self.split} = 1.0 "
                "to it, or leave data.split out"
            )
        if self.label_texts and LABEL_TEXTS not in self.mix:
            raise ValueError(
                "data.label_texts = true, but data.mix, which names every source, is without label texts: add "
                f"{LABEL_TEXTS} = 1.0 to it, or set data.label_texts = false"
            )
        return self
