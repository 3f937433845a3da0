"""The measuring process: runs one measurement after the other, and prints each name on standard output first."""

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.results import Results
from benchmarks.gpu.sections import SECTIONS

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Bench, Measurement

BAD_INPUT, DEVICE_LOST = 2, 3
_TOLD = 500  # characters kept of an error
_PATIENCE = 10  # factor on the limits of seconds, on a CPU


def work(arguments: Namespace) -> None:
    """Run the measurements without a result. Ends the process with BAD_INPUT, or DEVICE_LOST after an error."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: else the process would outlive its parent
    tell = _open_channel()
    _open_bundle(arguments)
    from benchmarks.gpu.bench import Bench
    from schemas.errors import InputError
    from trainer.device import open_device

    try:
        device = open_device(arguments.device)
    except InputError as error:
        _refuse(str(error))
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is loaded
    results = Results(arguments.out)
    bench = Bench(device, arguments.quick, arguments.out, arguments.bundle / "tate")
    _require_same(bench, results)
    sections = {name: list(_measurements(name, bench)) for name in arguments.only.split(",")}
    planned = [(_name(section, one), one) for section, listed in sections.items() for one in listed]
    tell(plan=[name for name, _ in planned])
    for name, one in planned:
        if name not in results.rows:
            # A CPU may be shared with other work; only a GPU's minutes are scarce.
            tell(begun=name, seconds=one.seconds if bench.on_gpu else _PATIENCE * one.seconds)
            results.add(name, _measure(bench, one))
            if "failed" in results.rows[name] and bench.on_gpu:
                _require_alive(bench)


def _name(section: str, one: "Measurement") -> str:
    return section if one.name == section else f"{section}: {one.name}"


def _measurements(section: str, bench: "Bench") -> "Iterator[Measurement]":
    """Yield the measurements of a section, or a measurement that raises the import error of the section's module."""
    from benchmarks.gpu.bench import Measurement

    module, _, function = SECTIONS[section].partition(":")
    try:
        yield from getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(bench)
    except Exception as error:
        problem = error

        def fail() -> dict[str, Any]:
            raise problem

        yield Measurement(section, fail)


def _measure(bench: "Bench", one: "Measurement") -> dict[str, Any]:
    from benchmarks.gpu.bench import SkippedError

    gc.collect()
    bench.reset_peak()
    if reason := bench.reason_to_skip(one):
        return {"left_out": reason}
    began = time.perf_counter()
    try:
        figures = one.measure()
    except SkippedError as error:
        figures = {"left_out": str(error)}
    except Exception as error:  # the other measurements continue
        traceback.print_exc()
        figures = {"failed": f"{type(error).__name__}: {error}"[:_TOLD]}
    return _rounded({**figures, "seconds": time.perf_counter() - began})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _require_alive(bench: "Bench") -> None:
    """End the process if an error made the device unusable; a new process can use it again."""
    try:
        bench.wait()
    except RuntimeError:
        sys.stderr.flush()
        os._exit(DEVICE_LOST)


def _require_same(bench: "Bench", results: Results) -> None:
    """Refuse existing results of a different device or size."""
    from trainer.device import describe_device

    here = {"device": describe_device(bench.device), "quick": bench.quick}
    there = {name: results.rows.get("versions", {}).get(name, value) for name, value in here.items()}
    if there != here:
        _refuse(f"{bench.folder}: its results are of {there}, and this is {here}. Give another --out.")


def _open_bundle(arguments: Namespace) -> None:
    """Allow imports of missing packages from the bundle."""
    packages = arguments.bundle / "packages"
    sys.path.append(str(packages.resolve()))
    lacking = [name for name in ("pydantic", "tomli_w") if importlib.util.find_spec(name) is None]
    if lacking:
        _refuse(
            f"{', '.join(lacking)}: neither installed here nor in {packages}. Run `make gpu-bundle` where there is a "
            "network, and carry build/gpu along with the checkout."
        )


def _refuse(message: str) -> None:
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(BAD_INPUT)


def _open_channel() -> Callable[..., None]:
    """Return a function that writes to the supervisor; all other prints go to standard error."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(**words: Any) -> None:
        channel.write(json.dumps(words) + "\n")

    return tell
