"""A plain PyTorch model, trained from the joined stream in a loop of its own: python own_loop.py DATA [NEGATIVES]."""

import sys

import torch

from schemas.layout import DataLayout
from trainer.config import Negatives
from trainer.negatives.planner import Planner
from trainer.stream import JoinedStream, open_sources

(queries,) = open_sources(DataLayout(sys.argv[1]), "train", label_texts=False)
vocabulary, labels = (queries.table.manifest.parameters[name] for name in ("vocabulary", "labels"))
source = queries.with_negatives(sys.argv[2] if len(sys.argv) > 2 else None)
plan = Planner(Negatives(random=200, hard=10), labels)  # what each batch is scored against
stream = JoinedStream([source], labels, batch=64, streams=8, plan=plan)
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
