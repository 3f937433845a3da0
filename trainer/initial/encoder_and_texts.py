"""Initial values of a model: its encoder from another run, its classifier from the texts of its labels."""

import torch

from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from trainer.config import Recipe
from trainer.evaluation.ranking import embed_texts
from trainer.model import Model, find_checkpoint


def begin_with_encoder(model: Model, data: DataLayout, recipe: Recipe) -> bool:
    """Take the encoder of the run `train.encoder_from`; whether there is one to take.

    Raises InputError: a frozen encoder that nobody trained, no run or no checkpoint there, one on other data, or one
    whose encoder is of another make; TableError.
    """
    url = recipe.train.encoder_from
    if not url:
        if recipe.train.freeze_encoder:
            raise InputError(
                "train.freeze_encoder: say whose encoder it is, with --set train.encoder_from=RUN, a run of `ngame` "
                "or of another recipe with the same encoder."
            )
        return False
    trained, checkpoint = find_checkpoint(data, RunLayout(url))
    differing = recipe.encoder.differences(trained.encoder)
    if differing:
        raise InputError(f"{url}: its encoder is of another make: {'; '.join(differing)}. Set them alike.")
    model.encoder.load_tensors(checkpoint.tensors("encoder"))
    return True


@torch.no_grad()
def begin_at_texts(model: Model, data: DataLayout, norm: float) -> None:
    """Vector l of this rank's labels becomes the embedding of label l's text, with length `norm`; biases stay.

    NGAME's classifiers begin so (appendix C, module M2), with an encoder that is trained already. Raises InputError
    where labels have not what the encoder reads or the head encodes them anyway, TableError.
    """
    head = model.head
    if not head.has_rows:
        raise InputError("classifier.initial = 'labels': a head that encodes labels has no vectors to begin with.")
    for first, z in embed_texts(model, data, head.start, head.stop):
        start = first - head.start
        head.vectors[start : start + len(z), : z.shape[1]] = z * norm
