"""A transformer as a LightningModule, trained on the texts of a mined table."""

import lightning
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from tuples_own_loop import Encoder, main

import extremis


class Module(lightning.LightningModule):
    def __init__(self, table, model, data, batch, negatives):
        super().__init__()
        self.encoder, self.batch = Encoder(model), batch
        self.opened = {"table": table, "data": data, "negatives": negatives}

    def train_dataloader(self):
        ranks = {"rank": self.trainer.global_rank, "ranks": self.trainer.world_size}
        tail = "drop" if ranks["ranks"] > 1 else "keep"
        self.stream = extremis.TupleStream(**self.opened, batch=self.batch * ranks["ranks"], tail=tail, **ranks)
        return StatefulDataLoader(self.stream, batch_size=self.batch)  # Lightning's checkpoints contain its state

    def on_train_epoch_start(self):
        self.stream.set_epoch(self.current_epoch)

    def training_step(self, columns, step):
        return self.encoder(dict(columns))["loss"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-5)


def train(table, model, data=None, epochs=3, batch=32, negatives=1, **changes):
    module = Module(table, model, data, batch, negatives)
    settings = {"max_epochs": epochs, "logger": False, "enable_checkpointing": False, **changes}
    lightning.Trainer(**settings).fit(module)
    return module.encoder


if __name__ == "__main__":
    main(train)
