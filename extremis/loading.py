"""`extremis.load`: a model whose errors name Python's arguments, and whose messages go where those of commands go."""

from collections.abc import Sequence
from os import PathLike

from extremis.command import naming_arguments
from extremis.console import say
from schemas.options import whole_number
from scoring import predict as prediction


class Model(prediction.Model):
    __doc__ = prediction.Model.__doc__

    predict = naming_arguments()(prediction.Model.predict)
    embed = naming_arguments()(prediction.Model.embed)


@naming_arguments()
def load(
    export: str | PathLike[str],
    *,
    exact: bool = False,
    threads: int | None = None,
    embedder: str | PathLike[str] | None = None,
    allow: Sequence[str] = (),
) -> Model:
    """Open the export at `export`, a directory or an object-store prefix; for a folder, open its current export.

    `exact`: score every label, without an index. `threads`: number of threads; None: all cores. `embedder`: a different
    path or hub name of the model that computed the dense vectors of DATA. `allow`: the scores from outside that may be
    imported, as "module:name"; an export without such a score needs none.
    Raises TableError if the export is missing or damaged, InputError if the model is missing or different or `threads`
    is no whole number above 0, and StorageError.
    """
    place = None if embedder is None else str(embedder)
    threads = None if threads is None else whole_number("threads", threads, 1)
    return Model(prediction.open_export(str(export), exact, threads, allow=allow), str(export), place, say)
