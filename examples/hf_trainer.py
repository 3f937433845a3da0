"""A plain PyTorch model under the Trainer of Hugging Face's transformers, from the joined stream."""

import argparse

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from schemas.errors import ExtremisError, InputError
from schemas.layout import DataLayout
from trainer.methods.astra import Negatives
from trainer.negatives.planner import Planner
from trainer.stream import JoinedStream, open_sources


class Model(torch.nn.Module):
    def __init__(self, vocabulary, labels):
        super().__init__()
        self.encoder, self.classifier = torch.nn.EmbeddingBag(vocabulary, 64), torch.nn.Linear(64, labels)

    def forward(self, tokens, offsets, ids, query, label, positive):
        scores = self.encoder(tokens, offsets) @ self.classifier.weight[ids].T + self.classifier.bias[ids]
        target = torch.zeros_like(scores).index_put_((query, label), positive)
        return {"loss": torch.nn.functional.binary_cross_entropy_with_logits(scores, target)}


def arguments(batch):
    """Return the arguments of `Model.forward` for a batch; the Trainer moves these to the device."""
    b = batch.to("cpu")
    ids, query, label = b.candidates.ids, b.candidates.pair_query, b.candidates.pair_label
    pairs = {"ids": ids, "query": query, "label": label, "positive": b.candidates.pair_positive.float()}
    return {"tokens": b.inputs.tokens.values, "offsets": b.inputs.tokens.offsets[:-1], **pairs}


class StreamTrainer(Trainer):
    def get_train_dataloader(self):
        """Use the stream unchanged: Accelerate would divide each rank's batches among ranks again."""
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=None, collate_fn=arguments)


class StreamEpochs(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **kwargs):
        kwargs["train_dataloader"].dataset.set_epoch(int(state.epoch))


def train(data, negatives=None, resume=None, **changes):
    settings = {"num_train_epochs": 3, "learning_rate": 0.01, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    settings |= {"logging_strategy": "epoch", "save_strategy": "no", "report_to": "none"}
    settings |= {"ddp_find_unused_parameters": False, **changes}
    args = TrainingArguments(**settings)
    if args.n_gpu > 1:  # DataParallel, which would cut columns as if they were rows
        raise InputError(f"one process for {args.n_gpu} GPUs: launch with torchrun --nproc-per-node={args.n_gpu}.")
    (queries,) = open_sources(DataLayout(data), "train", label_texts=False)
    vocabulary, labels = (queries.table.parameters[name] for name in ("vocabulary", "labels"))
    plan = Planner(Negatives(random=200, hard=10), labels)  # the candidates of each batch
    ranks = {"rank": args.process_index, "ranks": args.world_size}
    tail = "drop" if args.world_size > 1 else "keep"  # a rank may have no rows of a short last batch
    options = {"batch": 64, "streams": 8, "plan": plan, "tail": tail, **ranks}
    stream = JoinedStream([queries.with_negatives(negatives)], labels, **options)
    trainer = StreamTrainer(Model(vocabulary, labels), args, train_dataset=stream, callbacks=[StreamEpochs()])
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", metavar="DATA", help="output of `extremis shard`")
    parser.add_argument("negatives", nargs="?", help="a RUN (its newest table is joined) or a table of negatives")
    try:
        train(**vars(parser.parse_args()))
    except ExtremisError as error:
        parser.exit(error.exit_status, f"error: {error}\n")
