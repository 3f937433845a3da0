"""Training, search and full one-vs-all on a GPU, on synthetic data made on the spot; in at most 8 minutes.

It needs torch, transformers, numba, numpy, pyarrow, pydantic and what they bring; no Beam, no Faiss, no network.
Sections can be run alone. One that fails says so in its place, and the others are measured.

    python -m benchmarks.gpu [--only classifier,step,search,full,losses] [--device auto] [--quick]
"""

import argparse
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.common.report import report
from benchmarks.gpu import classifier_step, exact_search, one_vs_all, same_losses, whole_step
from trainer.device import describe_device, open_device

SECTIONS = {
    "losses": same_losses,
    "full": one_vs_all,
    "classifier": classifier_step,
    "step": whole_step,
    "search": exact_search,
}
CLAIM = "on a GPU, a step's cost does not grow with the labels, and the device does not wait"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--only", default=",".join(SECTIONS), help=f"sections with commas between: {','.join(SECTIONS)}"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, in seconds: tells whether it runs")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if not set(names) <= SECTIONS.keys():
        parser.error(f"--only {arguments.only}: expected some of {','.join(SECTIONS)}")
    device = open_device(arguments.device)
    if device.type == "cpu" and not arguments.quick:
        parser.error("there is no GPU here: its sizes are too large for a CPU; --quick tells whether all of it runs")
    figures: dict[str, Any] = {}
    for name in names:
        began = time.perf_counter()
        try:
            figures[name] = SECTIONS[name].measure(device, arguments.quick)
        except Exception as error:  # what is measured already is not lost
            traceback.print_exc()
            figures[name] = {"failed": f"{type(error).__name__}: {error}"}
        figures[name]["seconds"] = round(time.perf_counter() - began, 1)
        sys.stderr.write(f"{name}: {figures[name]}\n")
    ratios = {} if arguments.quick else _ratios(figures)
    bars = {name: bar for name, bar in BARS.items() if name in ratios}
    facts = {"device": describe_device(device), "cuda": torch.version.cuda, "quick": arguments.quick}
    report(CLAIM, figures, ratios, bars, **facts)


BARS = {
    "step at 100M : at 131K": "<1.3001",
    "ms at 100M": "<2.0001",
    "classifier of the step, 6 x 768": "<0.1001",
    "device idle, 6 x 768": "<0.0501",
    "full one-vs-all at 3M, GiB": "<8.0001",
    "losses off the CPU's": "<0.0010001",
}


def _ratios(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return what bars are about, as far as it is measured."""
    classifier, step = figures.get("classifier", {}), figures.get("step", {}).get("6x768", {})
    small, large = (classifier.get(f"B=512 D=64 L={name}", {}).get("own_ms") for name in ("131K", "100M"))
    losses = [row["of_cpu"] for row in figures.get("losses", {}).values() if isinstance(row, dict)]
    measured = {
        "step at 100M : at 131K": large / small if large and small else None,
        "ms at 100M": large,
        "classifier of the step, 6 x 768": step.get("classifier_share"),
        "device idle, 6 x 768": step.get("idle_share"),
        "full one-vs-all at 3M, GiB": figures.get("full", {}).get("gib"),
        "losses off the CPU's": max(losses, default=None),
    }
    return {name: value for name, value in measured.items() if value is not None}


if __name__ == "__main__":
    main()
