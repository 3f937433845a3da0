"""Token vectors from a pretrained model, which a bag uses as initial vectors in place of random vectors.

The vectors are rows of a static table (Model2Vec, sentence-transformers, WordLlama), or a transformer's input
embeddings.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from schemas.errors import InputError
from schemas.layout import DataLayout, find_tokenizer
from schemas.randomness import InitialWeights, Purpose
from schemas.table import Table
from trainer.device import torch_generator
from trainer.encoders.texts import STATIC_TENSORS, find_folder, reading_model, static_rows

_TRANSFORMER_TENSORS = tuple(
    f"{name}.weight" for name in ("word_embeddings", "embed_tokens", "tok_embeddings", "wte", "shared")
)


class _TokenTensor(NamedTuple):
    """The file that contains tensor `name`, and the tensor's number of columns."""

    columns: int
    file: Path
    name: str


def read_token_vectors(name: str, data: DataLayout) -> torch.Tensor:
    """Return the vectors, float32 [V, d], of DATA's tokens in model `name`; zero for tokens that the model lacks.

    Raises the same errors as `find_token_vectors`, and InputError if the model has no token vectors.
    """
    folder, tokens = find_token_vectors(name, data)
    with reading_model(_of(name)):
        rows = _widest(folder)
    if not rows.any():
        raise InputError(
            f"{_of(name)}: no token vectors found. Expected *.safetensors with {' or '.join(STATIC_TENSORS)} "
            "(Model2Vec, sentence-transformers, WordLlama), or with the input embeddings of a transformer."
        )
    if not rows.isfinite().all():
        raise InputError(f"{_of(name)}: a vector contains NaN or infinity. Use another model.")
    return torch.nn.functional.pad(rows[:tokens], (0, 0, 0, max(0, tokens - len(rows))))


def find_token_vectors(name: str, data: DataLayout) -> tuple[Path, int]:
    """Return the folder of a model with the same token ids as DATA, and the number of tokens V.

    Raises InputError if the directory or hub name does not exist, or if the model has a different tokenizer. Raises
    TableError.
    """
    folder, table = find_folder(name), Table.find(data.tokenizer, "tokenizer")
    if table is None:
        raise InputError(f"{_of(name)}: {data.root} contains no tokens. Shard data with texts.")
    data_vocabulary = Tokenizer.from_str(table.read_files()["tokenizer.json"].decode()).get_vocab()
    model_vocabulary = _vocabulary(name, folder)
    same = sum(model_vocabulary.get(token) == number for token, number in data_vocabulary.items())
    if same < len(data_vocabulary):
        raise InputError(
            f"{_of(name)}: only {same:,} of the {len(data_vocabulary):,} tokens of {data.root} have the same id in the "
            f"model, so the tokenizers differ. Shard with the model's tokenizer: extremis shard INPUT DATA "
            f"--tokenizer {name}"
        )
    return folder, int(table.parameters["vocabulary"])


def _of(name: str) -> str:
    return f"encoder.pretrained = {name!r}"


def _widest(folder: Path) -> torch.Tensor:
    """Return the widest token vectors in a model's files; a [0, 0] tensor if there are no token vectors."""
    found = [tensor for file in sorted(folder.rglob("*.safetensors")) for tensor in _token_tensors(file)]
    if not found:
        return torch.empty(0, 0)
    widest = max(found)
    with safe_open(widest.file, "pt") as file:
        if widest.name in STATIC_TENSORS:
            return static_rows({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        rows: torch.Tensor = file.get_tensor(widest.name).float()
        return rows


def _token_tensors(file: Path) -> list[_TokenTensor]:
    with safe_open(file, "pt") as tensors:
        names = [name for name in tensors.keys() if name in STATIC_TENSORS or name.endswith(_TRANSFORMER_TENSORS)]  # noqa: SIM118
        shapes = ((tensors.get_slice(name).get_shape(), name) for name in names)
        return [_TokenTensor(shape[1], file, name) for shape, name in shapes if len(shape) == 2]


def _vocabulary(name: str, folder: Path) -> dict[str, int]:
    try:
        if place := find_tokenizer(folder):
            return Tokenizer.from_file(str(place)).get_vocab()
        from transformers import AutoTokenizer  # for models without this file

        return dict(AutoTokenizer.from_pretrained(folder, trust_remote_code=False).get_vocab())
    except Exception as error:
        raise InputError(f"{_of(name)}: cannot load the tokenizer ({str(error).splitlines()[0]}).") from None


def fit_columns(rows: torch.Tensor, dimension: int, scale: float, seed: int) -> torch.Tensor:
    """Return `rows` [V, d] as [V, D]: centred, rotated, and scaled to a root mean square length of `scale`.

    If D < d, the columns are the D principal components; otherwise, a random orthonormal map turns d columns into D.
    Zero rows stay zero.
    """
    known, width = rows.any(1), rows.shape[1]
    centred = torch.where(known[:, None], rows - rows[known].mean(0), 0)
    if dimension < width:
        _, directions = torch.linalg.eigh(centred.T @ centred)  # ascending
        turn = directions[:, -dimension:]
    else:
        draw = torch_generator(seed, Purpose.INITIAL_WEIGHTS, InitialWeights.PRETRAINED)
        turn = torch.linalg.qr(torch.randn(dimension, width, generator=draw)).Q.T
    turned = centred @ turn
    return turned * (scale / turned[known].square().sum(1).mean().sqrt().clamp(min=1e-12))
