"""`extremis fuse`."""

from os import fspath
from typing import Annotated, Any

from extremis.command import Option, Progress, command
from extremis.commands.shared import Device, Place, Positive, Size, Step
from extremis.console import say
from schemas.sizes import parse_bytes
from scoring import QUERIES, SHORTLIST


@command()
def fuse(
    data: Place,
    run: Place,
    *,
    by: Annotated[str, Option(metavar="weights|MODULE:NAME")] = "weights",
    split: str | None = None,
    step: Step | None = None,
    shortlist: Positive = SHORTLIST,
    queries: Positive = QUERIES,
    memory: Size = "4GiB",
    linear: Size = "1GiB",
    device: Device = "auto",
    progress: Progress = True,
) -> dict[str, Any]:
    """Learn to combine the scores of RUN with other scores, on queries that RUN was not trained on.

    With weights, the vectors' scores are added to the scores of the labels' texts, to votes of the nearest training
    points, and to scores of a linear ranker on words and pairs of words, which this command fits. The embeddings of the
    training points are stored. With module:name, a function of your own combines the scores of vectors and texts with
    the label's frequency, such as NGAME's tree in a checkout (papers.ngame.tree:fit). The module is sought in the
    current folder, then on Python's path. The result replaces an earlier result in RUN/fusion.

    Options:
        by: Weighted sum of scores, or a function in a module of your own.
        step: Step of the checkpoint. Default: the best on validation, else the newest.
        split: Split to learn on, which must not contain rows that RUN was trained on. Default: the held-out rows of
            RUN, or val.
        shortlist: Number of best labels per query to rank again.
        queries: Number of queries to learn from, from the start of the split.
        memory: Memory limit for the training points: index codes and labels.
        linear: Limit for the size of the rows that the linear ranker learns from; 0: no linear ranker.

    Examples:
      extremis fuse data/ runs/1
      extremis evaluate data/ runs/1
      extremis export data/ runs/1 exported/
    """
    from scoring import fitting

    data, run = fspath(data), fspath(run)
    fit_options = fitting.FitOptions(split, step, shortlist, queries, device)
    if by != "weights":
        manifest = fitting.fit_score(data, run, by, fit_options)
        parameters = manifest.parameters
        pairs = f"{parameters['pairs']:,} pairs, {parameters['positive_pairs']:,} correct"
        say(f"fitted on {parameters['queries']:,} queries of {parameters['split']}: {pairs}")
    else:
        manifest = fitting.fit_weights(data, run, fit_options, parse_bytes(memory), parse_bytes(linear))
        say(fitting.describe_weights(manifest.parameters))
    say(f"saved in {run}; next: extremis evaluate {data} {run}")
    return {"data": data, "run": run, "digest": manifest.digest, **manifest.parameters}
