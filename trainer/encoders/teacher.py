"""A teacher: a cross-encoder, loaded from a transformers sequence classifier, that scores pairs of texts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from schemas.errors import InputError
from trainer.encoders.texts import VECTOR_FILES, digest_of, require_files
from trainer.threads import one_thread

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
                f"{'' if label is None else f', but not {label!r}'}. Name the output to use as the score with --label."
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
