"""Other people's text models, and a cross-encoder as a teacher."""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer, normalizers
from torch import nn

from schemas.errors import InputError, failure_of_hub, option
from schemas.ragged import Ragged, batches_by_length, offsets_of
from schemas.storage import file_sha256, sha256
from schemas.waits import Wait
from trainer.device import CPU
from trainer.encoders.base import WEIGHTS
from trainer.encoders.transformer_encoder import MODES, load_model, pool
from trainer.stream.batch import pad_rows
from trainer.threads import one_thread

_INPUT_MODULES = ("Transformer", "StaticEmbedding")
_OUTPUT_MODULES = ("Pooling", "Normalize", "Dense", "Dropout")
VECTOR_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")  # files that determine the vectors
STATIC_TENSORS = ("embeddings", "embedding.weight")  # names of a static table, in Model2Vec and elsewhere
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
_PROMPTS = {"queries": ("query",), "documents": ("document", "passage", "corpus")}  # names of prompts
_BATCH_TOKENS = {"cpu": 2048, "cuda": 1 << 16}
_STATIC_TOKENS = 512  # maximum number of tokens of a text without modules.json, as in Model2Vec


@dataclass(frozen=True)
class TextFiles:
    """Files of a text model in `folder`, checked but not loaded; `name`: the name that the user gave."""

    name: str
    folder: Path

    @classmethod
    def find(cls, name: str) -> "TextFiles":
        """Find the model `name`, a directory or hub name. Raises InputError for missing, pickled or unknown modules."""
        files = cls(name, find_folder(name))
        for kind, path in files.modules:
            require_files(kind, files.folder / path)
        return files

    @cached_property
    def modules(self) -> list[tuple[str, str]]:
        """Kind and folder of each module. Raises InputError for an unknown kind."""
        place = self.folder / "modules.json"
        if not place.exists():
            normalize = [("Normalize", "")] if self._config.get("normalize") else []
            return [("StaticEmbedding", ""), *normalize] if self._is_table else [("Transformer", ""), ("Pooling", "")]
        types = [str(module["type"]) for module in _read_json(place)]
        kinds = [name.rpartition(".")[2] if name.startswith("sentence_transformers.") else "" for name in types]
        if kinds[:1] not in [[kind] for kind in _INPUT_MODULES] or not {*kinds[1:]} <= {*_OUTPUT_MODULES}:
            raise InputError(
                f"{place}: expected the sentence_transformers modules {' or '.join(_INPUT_MODULES)}, followed by any "
                f"of {', '.join(_OUTPUT_MODULES)}; found: {', '.join(types) or 'nothing'}. Embed with the model's own "
                "library, and mine the vectors as arrays."
            )
        return list(zip(kinds, (str(module["path"]) for module in _read_json(place)), strict=True))

    @property
    def _config(self) -> Any:
        return _read_json(self.folder / "config.json")

    @property
    def _is_table(self) -> bool:
        """Return whether a directory without modules.json contains a static table that Model2Vec saved."""
        return self._config.get("model_type", "model2vec") == "model2vec" and (self.folder / "tokenizer.json").exists()

    @property
    def assumed(self) -> str | None:
        """Describe settings that are assumed because no file specifies them; None if nothing is assumed."""
        stated = (self.folder / "modules.json").exists() or self._is_table
        return None if stated else f"{self.name}: no modules.json, so the embedding is the mean over tokens"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the names and contents of all files that determine the vectors."""
        return digest_of(self.folder, (place for pattern in VECTOR_FILES for place in self.folder.rglob(pattern)))

    def prompt(self, what: str | None, stated: str | None) -> str:
        """Return the prefix for texts: prompt `stated` (by name or verbatim), else the prompt for `what`, else ""."""
        settings = _read_json(self.folder / "config_sentence_transformers.json")
        prompts = settings.get("prompts") or {}
        if stated is not None:
            return str(prompts.get(stated, stated))
        names = _PROMPTS.get(what or "", (settings.get("default_prompt_name"),))
        return next((str(prompts[name]) for name in names if prompts.get(name)), "")

    def open(self, device: torch.device, compute: str, prompt: str = "") -> "TextModel":
        """Load the model onto `device` with number type `compute`, float32 or bfloat16. Raises InputError."""
        (first, path), *others = self.modules
        with reading_model(self.name):
            read = _Transformer if first == "Transformer" else _Table
            reader = read(self, self.folder / path, device, compute, prompt)
            normal = partial(nn.functional.normalize, dim=1)
            steps = [
                _dense(self.folder / path, device) if kind == "Dense" else normal
                for kind, path in others
                if kind in ("Dense", "Normalize")
            ]
        return TextModel(reader, steps, device, prompt)


@contextlib.contextmanager
def reading_model(name: str) -> Iterator[None]:
    """Raise InputError if the block cannot read the files of the model `name`."""
    try:
        yield
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"{name}: the files are damaged or inconsistent ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}). Save the model again with the library that created the model."
        ) from error


def find_folder(name: str) -> Path:
    """Return the folder of the model `name`: the directory itself, or a download. Raises InputError, PeerError."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        with Wait(f"the hub to send the model {name}"):
            return Path(
                snapshot_download(name, allow_patterns=[*VECTOR_FILES, *(f"*/{each}" for each in VECTOR_FILES)])
            )
    except Exception as error:
        cause = (str(error) or type(error).__name__).splitlines()[0]
        raise failure_of_hub(error)(
            f"{name}: not a local directory, and not available from the hub ({cause}). Give a directory with a model, "
            "or a hub name that this machine can reach."
        ) from None


def digest_of(folder: Path, places: Iterable[Path]) -> str:
    """Return the SHA-256 of the contents of files and of the files' paths relative to `folder`."""
    contents = {str(place.relative_to(folder)): file_sha256(str(place)) for place in sorted({*places})}
    return sha256(json.dumps(contents).encode())


def require_files(kind: str, folder: Path) -> None:
    """Raise InputError if a module has no weights, only pickled weights, or no tokenizer."""

    def found(*patterns: str) -> list[str]:
        return sorted(str(place) for pattern in patterns for place in folder.glob(pattern))

    if kind in (*_INPUT_MODULES, "Dense") and not found("*.safetensors"):
        if pickled := found("*.bin", "*.pt", "*.pth", "*.ckpt"):
            raise InputError(
                f"{pickled[0]}: pickled weights can run code when they are opened, so Extremis does not open them. "
                "Save safetensors with the model's library: model.save_pretrained(folder)."
            )
        raise InputError(
            f"{folder}: no weights (*.safetensors) here; found: {', '.join(found('*')[:10]) or 'nothing'}."
        )
    if kind in _INPUT_MODULES and not found(*_TOKENIZERS):
        names = ", ".join(_TOKENIZERS)
        raise InputError(
            f"{folder}: no tokenizer ({names}) here. Save the tokenizer to this folder: "
            "tokenizer.save_pretrained(folder)."
        )


class _Transformer:
    """Maps texts to token ids, and token ids to pooled states [B, D]."""

    def __init__(self, files: TextFiles, folder: Path, device: torch.device, compute: str, prompt: str) -> None:
        from transformers import AutoTokenizer

        configs = [_read_json(place) for place in sorted(folder.glob("sentence_*_config.json"))]
        settings = configs[0] if configs else {}
        pooling = [_read_json(files.folder / path / "config.json") for kind, path in files.modules if kind == "Pooling"]
        config = pooling[0] if pooling and (files.folder / "modules.json").exists() else {}
        modes = config.get("pooling_mode") or [mode for mode, key in MODES.items() if config.get(key)] or ["mean"]
        self._modes = [modes] if isinstance(modes, str) else modes
        if not {*self._modes} <= {*MODES}:
            raise InputError(f"{files.name}: pooling is {modes}; expected one or more of {', '.join(MODES)}.")
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._model = load_model(str(folder), files.name).eval().to(device, getattr(torch, compute))
        self._device = device
        places = getattr(self._model.config, "max_position_embeddings", 0) or 0
        longest = settings.get("max_seq_length") or self._tokenizer.model_max_length
        self._longest = int(min(longest, places if places > 0 else 1 << 20))
        if settings.get("do_lower_case"):
            own = self._tokenizer.backend_tokenizer
            own.normalizer = normalizers.Sequence([normalizers.Lowercase(), *filter(None, [own.normalizer])])
        self._skip = 0
        if prompt and not config.get("include_prompt", True):
            (tokens,) = self.tokenize([prompt])
            self._skip = len(tokens) - int(tokens[-1] in self._tokenizer.all_special_ids)

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        made = self._tokenizer(texts, truncation=True, max_length=self._longest, return_attention_mask=False)
        ids: list[list[int]] = made["input_ids"]
        return ids

    def embed(self, tokens: Ragged) -> torch.Tensor:
        padded = pad_rows(tokens)
        # An empty row attends to one pad.
        mask = padded._replace(lengths=padded.lengths.clamp(min=1)).attention_mask.to(self._device)
        states = self._model(input_ids=padded.input_ids.to(self._device), attention_mask=mask.long()).last_hidden_state
        return pool(states.float(), mask, self._modes, self._skip)


class _Table:
    """Maps texts to token ids, and token ids to the mean of their rows in a table [B, D]; zero without tokens."""

    def __init__(self, files: TextFiles, folder: Path, device: torch.device, compute: str, prompt: str) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        tensors = load_file(sorted(folder.glob("*.safetensors"))[0], str(device))
        self._table = static_rows(tensors)
        self._device = device
        # Model2Vec leaves out unknown tokens, but sentence-transformers does not.
        self._drops_unknown = not (files.folder / "modules.json").exists()
        self._unknown = self._tokenizer.token_to_id(getattr(self._tokenizer.model, "unk_token", None) or "")

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        ids = [made.ids for made in self._tokenizer.encode_batch(texts, add_special_tokens=False)]
        return [[n for n in row if n != self._unknown][:_STATIC_TOKENS] for row in ids] if self._drops_unknown else ids

    def embed(self, tokens: Ragged) -> torch.Tensor:
        values, offsets = (torch.from_numpy(each).to(self._device) for each in tokens)
        return nn.functional.embedding_bag(values, self._table, offsets[:-1], mode="mean")


def static_rows(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the token vectors, float32 [V, d], from the tensors of a static table."""
    table = next(tensors[name] for name in STATIC_TENSORS if name in tensors).float()
    table = table[tensors["mapping"].long()] if "mapping" in tensors else table
    return table * tensors["weights"].float()[:, None] if "weights" in tensors else table


Step = Callable[[torch.Tensor], torch.Tensor]


def _dense(folder: Path, device: torch.device) -> Step:
    config, tensors = _read_json(folder / "config.json"), load_file(folder / WEIGHTS, str(device))
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    kind = getattr(nn, name.rpartition(".")[2], None) if name.startswith("torch.nn.modules.") else None
    features = {config.get("module_input_name"), config.get("module_output_name")}
    if kind is None or not features <= {None, "sentence_embedding"}:
        raise InputError(
            f"{folder / 'config.json'}: expected an activation_function of torch.nn, and only sentence_embedding as "
            "input and output. Embed with the model's own library."
        )
    act, residual = kind(), config.get("use_residual")
    weight, bias, other = tensors["linear.weight"], tensors.get("linear.bias"), tensors.get("residual.weight")

    def apply(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = act(nn.functional.linear(x, weight, bias))
        return y + (x if other is None else nn.functional.linear(x, other)) if residual else y

    return apply


@dataclass(frozen=True)
class TextModel:
    """Loaded model, which maps B texts to vectors [B, D] float32."""

    reader: _Transformer | _Table
    steps: Sequence[Step]
    device: torch.device
    prompt: str = ""

    def embed(self, texts: list[str], threads: int = 1) -> np.ndarray:
        """Embed texts, longest first, in batches that depend only on the texts; any `threads` gives the same bytes."""
        ids = self.reader.tokenize([self.prompt + text for text in texts])
        lengths = np.array([len(row) for row in ids], np.int64)
        tokens = Ragged(np.fromiter((n for row in ids for n in row), np.int64, lengths.sum()), offsets_of(lengths))
        batches = list(batches_by_length(lengths, _BATCH_TOKENS[self.device.type]))
        # Each thread computes whole batches alone, so the number of threads does not change sums.
        with (
            one_thread(),
            ThreadPoolExecutor(threads if self.device == CPU else 1, "embed", torch.set_num_threads, (1,)) as workers,
        ):
            parts = list(workers.map(lambda rows: self._embed(tokens.take(rows)), batches))
        return np.concatenate(parts)[np.argsort(np.concatenate(batches))]

    @torch.inference_mode()
    def _embed(self, tokens: Ragged) -> np.ndarray:
        x = self.reader.embed(tokens)
        for step in self.steps:
            x = step(x)
        made: np.ndarray = x.cpu().numpy()
        return made


def choose_compute(stated: str, device: torch.device) -> str:
    """Return the number type for computation; "auto" means bfloat16 if the processor supports bfloat16."""
    if stated != "auto":
        return stated
    if device != CPU:
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    place = Path("/proc/cpuinfo")
    flags = place.read_text() if place.exists() else ""
    return "bfloat16" if re.search(r"\b(amx_bf16|avx512_bf16|bf16)\b", flags) else "float32"


def _read_json(place: Path) -> Any:
    """Read a JSON file; return an empty dict if the file does not exist. Raises InputError."""
    try:
        return json.loads(place.read_text("utf-8")) if place.exists() else {}
    except ValueError as error:
        raise InputError(f"{place}: not JSON: {error}. Save the model again.") from None


_AT_ONCE = 1 << 14  # number of pairs with tokens in memory at a time


@dataclass(frozen=True)
class TeacherFiles:
    """Files of a cross-encoder in the folder `name`, checked but not loaded; `output`: index of the output to use."""

    name: str
    output: int
    digest: str

    @classmethod
    def find(cls, name: str, label: str | None) -> "TeacherFiles":
        """Check a directory; if the model has several outputs, `label` is the name of the output to use.

        Raises InputError if the directory is missing, has pickled weights or no tokenizer, or if the model has several
        outputs and no output called `label`.
        """
        folder = Path(name)
        if not folder.is_dir():
            raise InputError(
                f"{name}: no such directory. Give a directory with a cross-encoder that save_pretrained wrote."
            )
        require_files("Transformer", folder)
        config = _load("AutoConfig", name)
        kinds = ", ".join(config.architectures or ["no architecture"])
        if "SequenceClassification" not in kinds:
            raise InputError(f"{name}: expected a sequence classifier, got {kinds}. Give a cross-encoder.")
        names = [str(config.id2label[number]) for number in range(config.num_labels)]
        if len(names) > 1 and label not in names:
            raise InputError(
                f"{name}: the model has {len(names)} outputs: {', '.join(names[:10])}"
                f"{'' if label is None else f', but not {label!r}'}. Name the one to use: {option('label')}."
            )
        digest = digest_of(folder, (place for pattern in VECTOR_FILES for place in folder.glob(pattern)))
        return cls(name, names.index(label) if label in names else 0, digest)

    def open(self, device: torch.device) -> "Teacher":
        """Load the model to `device`. Raises InputError if files are inconsistent or the head has no weights."""
        tokenizer = _load("AutoTokenizer", self.name)
        model, info = _load(
            "AutoModelForSequenceClassification", self.name, use_safetensors=True, output_loading_info=True
        )
        if info["missing_keys"]:
            missing = ", ".join(sorted(info["missing_keys"])[:3])
            raise InputError(
                f"{self.name}: the model has no weights for {missing}, so its scores are random. Give a trained "
                "teacher."
            )
        return Teacher(tokenizer, model.eval().to(device), self.output, device)


@dataclass(frozen=True)
class Teacher:
    """Cross-encoder, loaded and ready to score."""

    tokenizer: Any
    model: Any
    output: int
    device: torch.device

    def score(self, queries: list[str], labels: list[str], batch: int) -> np.ndarray:
        """Score V pairs of texts; return float32 [V].

        The score is the output's logit or, if the model has several outputs, the logit of the output's softmax
        probability.

        Pairs are sorted by length, longest first, and scored in batches of `batch` pairs, so batches depend only on the
        pairs. One thread computes all scores, so the same pairs always give bitwise the same scores.
        """
        scores = np.empty(len(queries), np.float32)
        with one_thread(), torch.inference_mode():
            for first in range(0, len(queries), _AT_ONCE):
                some = slice(first, first + _AT_ONCE)
                scores[some] = self._score(queries[some], labels[some], batch)
        return scores

    def _score(self, queries: list[str], labels: list[str], batch: int) -> np.ndarray:
        places = getattr(self.model.config, "max_position_embeddings", None) or 1 << 20
        longest = min(self.tokenizer.model_max_length, places)
        tokens = self.tokenizer(queries, labels, truncation="longest_first", max_length=longest)
        order = np.argsort([-len(ids) for ids in tokens["input_ids"]], kind="stable")
        scores = np.empty(len(order), np.float32)
        for first in range(0, len(order), batch):
            some = order[first : first + batch]
            rows = [{name: values[pair] for name, values in tokens.items()} for pair in some.tolist()]
            logits = self.model(**self.tokenizer.pad(rows, return_tensors="pt").to(self.device)).logits.float()
            score = logits[:, self.output]
            if logits.shape[1] > 1:
                others = torch.arange(logits.shape[1], device=logits.device) != self.output
                score = score - logits[:, others].logsumexp(1)
            scores[some] = score.cpu().numpy()
        return scores


def _load(kind: str, name: str, **options: Any) -> Any:
    """Load part of a directory with transformers class `kind`; runs no code from the directory. Raises InputError."""
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(
            name, trust_remote_code=False, local_files_only=True, **options
        )
    except (OSError, ValueError, LookupError, RuntimeError, TypeError) as error:
        cause = str(error).strip().partition("\n")[0]
        raise InputError(f"{name}: {kind} cannot open the model: {cause} Save the model again.") from error
