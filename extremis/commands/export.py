"""`extremis export`."""

from collections.abc import Sequence
from os import fspath
from typing import Annotated, Any, Literal

from extremis.command import Option, Progress, comma_list, command
from extremis.commands.shared import Device, Place, Step
from extremis.console import say

_precisions = comma_list(float, "comma-separated numbers, for example 0.5,0.9")


@command()
def export(
    data: Place,
    run: Place,
    out: Place,
    *,
    step: Step | None = None,
    dtype: Literal["float32", "float16"] = "float32",
    form: Literal["auto", "torch", "onnx", "onnx-int8"] = "auto",
    index: str = "auto",
    target_recall: float = 0.98,
    precision: Annotated[Sequence[float], Option(metavar="SHARE,...", parse=_precisions)] = (0.5, 0.7, 0.9),
    threshold_split: str | None = None,
    calibrate: bool = False,
    scores: Literal["classifier", "sum", "fused"] | None = None,
    onto: Annotated[Place | None, Option(metavar="EXPORT")] = None,
    current: bool = False,
    overwrite: bool = False,
    device: Device = "auto",
    progress: Progress = True,
) -> dict[str, Any]:
    """Export a checkpoint of RUN to OUT: encoder, vectors, labels, thresholds, and an index if there are many labels.

    A transformer becomes a directory that sentence-transformers and transformers can open, or an ONNX graph, which
    needs no PyTorch. With --onto, OUT contains only the changes since an earlier export, and refers to that export's
    files for the rest. See docs/export.md.

    Options:
        form: Format of a transformer: torch; onnx, a graph with the same embeddings as in PyTorch (extra onnx);
            onnx-int8, a graph with 8-bit numbers. Default: the format of EXPORT (--onto), else torch.
        index: none, auto (none up to 131,072 labels, else inverted lists), or a Faiss factory string such as HNSW32.
        target_recall: Recall for which the index is tuned.
        precision: Precisions for which thresholds are measured, in addition to those of EXPORT (--onto).
        threshold_split: Split to measure thresholds on, or none. Default: val, else the held-out rows of RUN.
        calibrate: Learn to convert scores to probabilities, on the same rows. Needs scikit-learn (extra fusion).
            Default: as in EXPORT (--onto).
        scores: sum adds the embeddings of the labels' texts to the vectors; fused uses the result of `extremis fuse`.
            Default: fused, if the checkpoint has a fusion.
        onto: Earlier export that OUT refers to; for a folder of exports, its current export.
        current: Make OUT the current export of its folder. `predict` and `load` then open OUT if they get the folder.
        overwrite: Replace an existing export of another run, or with other options.

    Examples:
      extremis export data/ runs/1 exported/
      extremis export data/2 runs/2 exports/2 --onto exports/1 --current
    """
    from scoring.export_versions import export_name, make_current

    data, run, out = fspath(data), fspath(run), fspath(out)
    if current:
        export_name(out)
    from scoring.calibration import describe_calibration
    from scoring.export import export as export_run

    manifest = export_run(
        data,
        run,
        out,
        step=step,
        dtype=dtype,
        index=index,
        target_recall=target_recall,
        precisions=tuple(precision),
        split=threshold_split,
        scores=scores,
        onto=None if onto is None else fspath(onto),
        overwrite=overwrite,
        device=device,
        calibrate=calibrate,
        form=form,
        say=say,
    )
    parameters = manifest.parameters
    by = parameters["options"].get("scores", "classifier")
    step, dimension = parameters["step"], parameters["dimension"]
    say(f"{out}: step {step:,}, scores {by}, {manifest.rows:,} labels of {dimension} dimensions")
    if parameters["options"].get("calibrate"):
        split, measured = parameters["thresholds"]["split"], parameters["thresholds"]["calibration"]
        halves = f"each half of {measured['queries']:,} queries of {split} by a curve fitted to the other half"
        say(describe_calibration(measured, f"({halves}; the exported curve is fitted to both)"))
    if current:
        say(f"{make_current(out)}: the current export is now {out}")
    say(f'next: echo "some text" | extremis predict {out} - -')
    shown = {name: parameters[name] for name in ("step", "dimension", "bias", "index", "thresholds")}
    return {"out": out, "digest": manifest.digest, "labels": manifest.rows, **shown}
