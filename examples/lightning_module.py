"""A plain PyTorch model as a LightningModule, trained from the joined stream."""

import argparse

import lightning
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from schemas.errors import ExtremisError
from schemas.layout import DataLayout
from trainer.methods.astra import Negatives
from trainer.negatives.planner import Planner
from trainer.stream import JoinedStream, open_sources


class Module(lightning.LightningModule):
    def __init__(self, data, negatives=None):
        super().__init__()
        (queries,) = open_sources(DataLayout(data), "train", label_texts=False)
        vocabulary, self.labels = (queries.table.parameters[name] for name in ("vocabulary", "labels"))
        self.source = queries.with_negatives(negatives)
        self.encoder, self.classifier = torch.nn.EmbeddingBag(vocabulary, 64), torch.nn.Linear(64, self.labels)

    def train_dataloader(self):
        plan = Planner(Negatives(random=200, hard=10), self.labels)  # the candidates of each batch
        ranks = {"rank": self.trainer.global_rank, "ranks": self.trainer.world_size}
        tail = "drop" if ranks["ranks"] > 1 else "keep"  # a rank may have no rows of a short last batch
        self.stream = JoinedStream([self.source], self.labels, batch=64, streams=8, plan=plan, tail=tail, **ranks)
        return StatefulDataLoader(self.stream, batch_size=None)  # Lightning's checkpoints contain its state

    def on_train_epoch_start(self):
        self.stream.set_epoch(self.current_epoch)

    def training_step(self, b, step):
        ids, query, label = b.candidates.ids, b.candidates.pair_query, b.candidates.pair_label
        queries = self.encoder(b.inputs.tokens.values, b.inputs.tokens.offsets[:-1])
        scores = queries @ self.classifier.weight[ids].T + self.classifier.bias[ids]
        target = torch.zeros_like(scores).index_put_((query, label), b.candidates.pair_positive.float())
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, target)
        self.log("loss", loss, prog_bar=True, batch_size=len(b))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(data, negatives=None, resume=None, **changes):
    settings = {"max_epochs": 3, "logger": False, "enable_checkpointing": False, **changes}
    module = Module(data, negatives)
    lightning.Trainer(**settings).fit(module, ckpt_path=resume)
    return module


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", metavar="DATA", help="output of `extremis shard`")
    parser.add_argument("negatives", nargs="?", help="a RUN (its newest table is joined) or a table of negatives")
    try:
        train(**vars(parser.parse_args()))
    except ExtremisError as error:
        parser.exit(error.exit_status, f"error: {error}\n")
