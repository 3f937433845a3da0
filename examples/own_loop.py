"""Train a plain PyTorch model on the joined stream in your own loop."""

import argparse

import torch

from schemas.errors import ExtremisError
from schemas.layout import DataLayout
from trainer.methods.astra import Negatives
from trainer.negatives.planner import Planner
from trainer.stream import JoinedStream, open_sources


def train(data, negatives=None):
    (queries,) = open_sources(DataLayout(data), "train", label_texts=False)
    vocabulary, labels = (queries.table.parameters[name] for name in ("vocabulary", "labels"))
    plan = Planner(Negatives(random=200, hard=10), labels)  # the candidates of each batch
    stream = JoinedStream([queries.with_negatives(negatives)], labels, batch=64, streams=8, plan=plan)
    encoder, classifier = torch.nn.EmbeddingBag(vocabulary, 64), torch.nn.Linear(64, labels)
    optimizer = torch.optim.Adam([*encoder.parameters(), *classifier.parameters()], lr=0.01)
    for epoch in range(3):
        stream.set_epoch(epoch)
        for batch in torch.utils.data.DataLoader(stream, batch_size=None):
            b = batch.to("cpu", non_blocking=True)
            ids, query, label = b.candidates.ids, b.candidates.pair_query, b.candidates.pair_label
            scores = encoder(b.inputs.tokens.values, b.inputs.tokens.offsets[:-1]) @ classifier.weight[ids].T
            target = torch.zeros_like(scores).index_put_((query, label), b.candidates.pair_positive.float())
            loss = torch.nn.functional.binary_cross_entropy_with_logits(scores + classifier.bias[ids], target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss:.4f} at step {batch.step}")
    return encoder, classifier


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", metavar="DATA", help="output of `extremis shard`")
    parser.add_argument("negatives", nargs="?", help="a RUN (its newest table is joined) or a table of negatives")
    try:
        train(**vars(parser.parse_args()))
    except ExtremisError as error:
        parser.exit(error.exit_status, f"error: {error}\n")
