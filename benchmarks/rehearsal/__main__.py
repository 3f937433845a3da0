"""Rehearse a run: do one rank's part of every stage here, and print the measurements beside the plan.

Options that are not listed are those of `extremis plan`.

    python -m benchmarks.rehearsal --queries 370e6 --labels 120e6 --ranks 16 --dimension 64 [--rank 3] [--minutes 5]
"""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from benchmarks.rehearsal.rehearse import Rehearsal, parse_speed, rehearse, show
from extremis import planning as planning
from extremis.cli import cli
from extremis.console import say
from schemas.errors import ExtremisError
from schemas.options import check
from schemas.sizes import parse_bytes
from trainer.recipe_files import load_recipe


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearsal", description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=0, help="rank to rehearse")
    parser.add_argument("--network", default="10Gbit", help="bits per second between ranks (10Gbit)")
    parser.add_argument("--latency", type=float, default=0.1, help="milliseconds of a message besides its bytes (0.1)")
    parser.add_argument("--disk", help="bytes per second of the disk; default: measured")
    parser.add_argument("--folder", default="", help="folder for the rehearsal's files; default: TMPDIR")
    parser.add_argument("--minutes", type=float, default=5, help="approximate time; if short, stages are done in part")
    arguments, planned = parser.parse_known_args()
    try:
        print(json.dumps(run(arguments, planned)))
    except ExtremisError as error:
        sys.exit(f"error: {error}")


def run(arguments: argparse.Namespace, planned: list[str]) -> dict[str, Any]:
    """Rehearse the workload of the options `planned` of `extremis plan`. Raises InputError, TableError."""
    line: Any = cli.commands["plan"]
    given = {name: value for name, value in line.make_context("plan", planned).params.items() if value}
    model = line.described.model
    options = check(model, {name: value for name, value in given.items() if name in model.model_fields}).model_dump()
    keys = {"encoder.dimension": "dimension", "negatives.width": "width", "train.epochs": "epochs"}
    stated = {key: options[name] for key, name in keys.items() if options[name] is not None}
    overrides = (*options["set"], *(f"{key}={value}" for key, value in stated.items()))
    averages = {name: options[name] for name in (*planning.AVERAGES, "vocabulary", "ranks", "workers")}
    recipe, data = options["recipe"], options["data"]
    rows, labels = (None if options[name] is None else int(options[name]) for name in ("queries", "labels"))
    workload = planning.workload(data, rows, labels, load_recipe(recipe, overrides), options["memory"], averages)
    resolved = planning.resolve_for(workload, recipe, overrides, data)
    workload = replace(workload, recipe=planning.with_streams_for(options["ranks"], resolved.recipe, say))
    speeds = parse_speed(arguments.network), float(parse_bytes(arguments.disk)) if arguments.disk else 0.0
    work = Rehearsal(workload, arguments.rank, *speeds, arguments.minutes, arguments.folder, arguments.latency / 1000)
    rehearsal = rehearse(work, say)
    show(rehearsal)
    return rehearsal


if __name__ == "__main__":
    main()
