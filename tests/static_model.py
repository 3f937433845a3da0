"""A model of texts that is a static table with prompts: it embeds thousands of texts in a second."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file

from pipelines.sharding.tokenizer import train_wordpiece

PROMPTS = {"query": "query ", "document": "the "}
_SIZE = 150  # of its vocabulary, at most


def write_static_model(folder: Path, texts: list[str], dimension: int = 6, seed: int = 0) -> str:
    """Write a model that knows the words of `texts`; its directory."""
    folder.mkdir(parents=True, exist_ok=True)
    made = train_wordpiece(pa.chunked_array([[*texts, "query number 0 1 2 3 4 5 6 7 8 9"] * 2]), _SIZE)
    made.save(str(folder / "tokenizer.json"))
    table = np.random.default_rng(seed).standard_normal((made.get_vocab_size(), dimension)).astype(np.float32)
    save_file({"embedding.weight": torch.from_numpy(table)}, folder / "model.safetensors")
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.StaticEmbedding"}
    (folder / "modules.json").write_text(json.dumps([module]))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    return str(folder)
