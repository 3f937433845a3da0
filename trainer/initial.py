"""Where a classifier begins: at the texts of its labels, as the encoder embeds them before training."""

import torch
from torch.nn.functional import normalize

from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.shards import iterate
from trainer.classifier import Classifier
from trainer.inputs import require_inputs
from trainer.model import Model


@torch.no_grad()
def begin_at_texts(model: Model, data: DataLayout, norm: float) -> None:
    """Vector l of this rank's labels becomes the embedding of label l's text, with length `norm`; biases stay.

    NGAME's classifiers begin so (appendix C, module M2), with an encoder that is trained already. Raises InputError
    where labels have not what the encoder reads or the head encodes them anyway, TableError.
    """
    classifier = model.classifier
    if not isinstance(classifier, Classifier):
        raise InputError("classifier.initial = 'labels': a head that encodes labels has no vectors to begin with.")
    manifest = open_manifest(data.labels, "labels")
    require_inputs(data.labels, manifest, model.inputs)
    first = 0
    for rows in iterate(data.labels, manifest, model.columns):
        low, high = (min(max(end - first, 0), rows.num_rows) for end in (classifier.start, classifier.stop))
        if low < high:
            x = model.embed_table(rows.slice(low, high - low))[:, : model.encoder.dimension]
            start = first + low - classifier.start
            classifier.vectors[start : start + len(x), : x.shape[1]] = normalize(x.float()) * norm
        first += rows.num_rows
