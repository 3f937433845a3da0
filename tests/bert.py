"""Transformers with a few weights, made on the spot."""

from pathlib import Path

import torch
from transformers import BertConfig, BertModel


def write_bert(folder: Path, vocabulary: int, layers: int = 2, hidden: int = 16, dropout: float = 0.2) -> str:
    """A BERT with 2 heads and room for 32 tokens, the same weights each time; returns its folder."""
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
    return str(folder)
