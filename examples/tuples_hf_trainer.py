"""A transformer, trained by the Trainer of Hugging Face's transformers on the texts of a mined table."""

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from tuples_own_loop import Encoder, main

import extremis


class TupleTrainer(Trainer):
    def get_train_dataloader(self):
        """Use the stream unchanged: Accelerate would divide each rank's batches among ranks again."""
        collate = torch.utils.data.default_collate
        size = self.args.per_device_train_batch_size
        return torch.utils.data.DataLoader(self.train_dataset, size, collate_fn=lambda rows: {"columns": collate(rows)})


class Epochs(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **kwargs):
        kwargs["train_dataloader"].dataset.set_epoch(int(state.epoch))


def train(table, model, data=None, epochs=3, batch=32, negatives=1, **changes):
    settings = {"num_train_epochs": epochs, "learning_rate": 2e-5, "per_device_train_batch_size": batch}
    settings |= {"save_strategy": "no", "report_to": "none", "remove_unused_columns": False, **changes}
    args = TrainingArguments(**settings)
    ranks = {"rank": args.process_index, "ranks": args.world_size}
    tail = "drop" if args.world_size > 1 else "keep"
    size = batch * args.world_size
    stream = extremis.TupleStream(table, data, negatives=negatives, batch=size, tail=tail, **ranks)
    trainer = TupleTrainer(Encoder(model), args, train_dataset=stream, callbacks=[Epochs()])
    trainer.train()
    return trainer.model


if __name__ == "__main__":
    main(train)
