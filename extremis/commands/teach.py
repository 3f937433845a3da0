"""`extremis teach`: scores negatives with a cross-encoder."""

from os import fspath
from typing import Any

from extremis.command import Progress, build_options, command
from extremis.commands.shared import BeamOptions, Device, Place, StartTimeout
from extremis.console import say
from pipelines.options import TeachOptions


@command(TeachOptions)
def teach(
    data: Place,
    table: Place,
    teacher: Place,
    out: Place,
    *,
    margin: float | None = None,
    relative_margin: float | None = None,
    width: int | None = None,
    label: str | None = None,
    batch: int | None = None,
    device: Device = "auto",
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
) -> dict[str, Any]:
    """Score the negatives of TABLE with a cross-encoder, and write a table with the column `teacher`.

    TEACHER is a directory with a cross-encoder. With a margin, the command drops negatives that the teacher scores
    close to or above a positive. Queries and labels need texts. Options after -- are passed to Beam.

    Examples:
      extremis teach data/ negatives/queries cross-encoder/ negatives/scored
      extremis teach data/ negatives/queries cross-encoder/ negatives/sure --relative-margin 0.05 --width 20
    """
    options, out = build_options(TeachOptions, locals()), fspath(out)
    from pipelines.mining import derived as teaching

    place, model = fspath(table), fspath(teacher)
    manifest = teaching.teach(fspath(data), place, model, out, options, beam_options, say, device)
    dropped = manifest.counters["above_teacher_margin"]
    say(f"{out}: {manifest.rows:,} rows, {manifest.counters['kept']:,} negatives kept and {dropped:,} dropped")
    say(f"next: extremis inspect {out}")
    return {"out": out, "digest": manifest.digest, "rows": manifest.rows, "counters": manifest.counters}
