"""Where a classifier begins: at the texts of its labels, as the encoder embeds them before training."""

import torch

from schemas.errors import InputError
from schemas.layout import DataLayout
from trainer.classifier import Classifier
from trainer.embedded import embed_texts
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
    for first, z in embed_texts(model, data, classifier.start, classifier.stop):
        start = first - classifier.start
        classifier.vectors[start : start + len(z), : z.shape[1]] = z * norm
