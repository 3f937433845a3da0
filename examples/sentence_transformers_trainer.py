"""A SentenceTransformer under its Trainer; each epoch ends with embedding and mining of new negatives."""

import argparse
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import TrainerCallback

import extremis


class Miner:
    """Mines negatives for the pairs of a file with the current model, into folders below `out`."""

    def __init__(self, pairs, out, **options):
        lines = [json.loads(line) for line in Path(pairs).read_text().splitlines()]
        sides = [[line[name] for line in lines] for name in ("anchor", "positive")]
        self.texts = [list(dict.fromkeys(side)) for side in sides]  # each once
        self.out, self.options = Path(out), {"metric": "cosine", "progress": False, **options}
        self.out.mkdir(parents=True, exist_ok=True)
        rows = [{text: row for row, text in enumerate(texts)} for texts in self.texts]
        positives = [[of[text] for text in side] for of, side in zip(rows, sides, strict=True)]
        pq.write_table(pa.table({"query": positives[0], "document": positives[1]}), self.out / "positives.parquet")
        for name, texts in zip(("queries", "documents"), self.texts, strict=True):
            pq.write_table(pa.table({"text": texts}), self.out / f"{name}.parquet")

    def mine(self, model, epoch):
        """Return the folder of the tables for `epoch`."""
        queries, documents = (model.encode(texts, show_progress_bar=False) for texts in self.texts)
        texts = {"query_texts": self.out / "queries.parquet", "document_texts": self.out / "documents.parquet"}
        out = self.out / f"epoch-{epoch}"
        extremis.mine(queries, documents, positives=self.out / "positives.parquet", out=out, **texts, **self.options)
        return out


class Refresh(TrainerCallback):
    """Embeds and mines at the end of an epoch; the stream continues with the new negatives."""

    def __init__(self, stream, miner, epochs):
        self.stream, self.miner, self.epoch, self.epochs = stream, miner, 0, epochs

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        self.epoch += 1
        more = self.epoch < self.epochs  # where max_steps is more than that, the last table stays
        self.stream.set_epoch(self.epoch, self.miner.mine(model, self.epoch) if more else None)


def train(pairs, out, model, epochs=3, batch=32, negatives=1, mining=None, **changes):
    model = SentenceTransformer(str(model))
    miner = Miner(pairs, out, width=max(negatives, 10), **(mining or {}))
    stream = extremis.TupleStream(miner.mine(model, 0), negatives=negatives, batch=batch)
    features = datasets.Features.from_arrow_schema(stream.schema)
    examples = datasets.IterableDataset.from_generator(lambda: iter(stream), features)
    settings = {"output_dir": f"{out}/trained", "per_device_train_batch_size": batch, "save_strategy": "no"}
    settings |= {"max_steps": epochs * -(-len(stream) // batch), "report_to": "none", **changes}
    trainer = SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(**settings),
        examples,
        loss=MultipleNegativesRankingLoss(model),
        callbacks=[Refresh(stream, miner, epochs)],
    )
    trainer.train()
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", metavar="PAIRS", help="JSON lines: anchor, positive")
    parser.add_argument("out", metavar="OUT", help="a folder for the tables")
    parser.add_argument("model", metavar="MODEL", help="a directory, or a hub name")
    try:
        train(**vars(parser.parse_args())).save(f"{parser.parse_args().out}/model")
    except extremis.ExtremisError as error:
        parser.exit(error.exit_status, f"error: {error}\n")
