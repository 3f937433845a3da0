"""Train a transformer in your own loop on the texts of a mined table."""

import argparse

import torch
from transformers import AutoModel, AutoTokenizer

import extremis


class Encoder(torch.nn.Module):
    """Mean of a transformer's last hidden states, normalized to length 1."""

    def __init__(self, directory):
        super().__init__()
        self.tokenizer, self.model = AutoTokenizer.from_pretrained(directory), AutoModel.from_pretrained(directory)

    def encode(self, texts):
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
        tokens = tokens.to(self.model.device)
        mask = tokens["attention_mask"][:, :, None]
        return torch.nn.functional.normalize((self.model(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1))

    def forward(self, columns):
        """Return the loss of picking each anchor's positive among all positives and negatives of the batch."""
        anchors = self.encode(columns.pop("anchor"))
        scores = 20 * anchors @ self.encode([text for texts in columns.values() for text in texts]).T
        return {"loss": torch.nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))}


def train(table, model, data=None, epochs=3, batch=32, negatives=1):
    encoder = Encoder(model)
    stream = extremis.TupleStream(table, data, negatives=negatives, batch=batch)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-5)
    for epoch in range(epochs):
        stream.set_epoch(epoch)  # a second argument is a table that was mined in the meantime
        for columns in torch.utils.data.DataLoader(stream, batch_size=batch):
            loss = encoder(columns)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss:.4f}")
    return encoder


def main(train):
    parser = argparse.ArgumentParser()
    parser.add_argument("table", metavar="TABLE", help="what `extremis mine` wrote")
    parser.add_argument("model", metavar="MODEL", help="a directory, or a hub name")
    parser.add_argument("data", metavar="DATA", nargs="?", help="of a table that was not mined from arrays")
    try:
        train(**vars(parser.parse_args()))
    except extremis.ExtremisError as error:
        parser.exit(error.exit_status, f"error: {error}\n")


if __name__ == "__main__":
    main(train)
