"""Versions of packages, the device and its memory, and the trainer's modules that can be imported."""

import importlib
import pkgutil
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import trainer
from benchmarks.gpu.bench import Bench, Measurement
from trainer.device import describe_device

PACKAGES = ("torch", "triton", "numpy", "numba", "pyarrow", "transformers", "pydantic", "faiss-cpu", "apache-beam")


def measurements(bench: Bench) -> Iterator[Measurement]:
    yield Measurement("versions", lambda: _versions(bench))
    yield Measurement("copy", lambda: {"gb_s": bench.copy_gigabytes()}, gib=3 if bench.on_gpu else 0)


def _versions(bench: Bench) -> dict[str, Any]:
    lacking = {}
    names = [module.name for module in pkgutil.walk_packages(trainer.__path__, "trainer.")]
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            lacking[name] = str(error.name)
    figures: dict[str, Any] = {"modules": len(names), "lacking": lacking, "cuda": torch.version.cuda}
    if bench.on_gpu:
        facts = torch.cuda.get_device_properties(bench.device)
        figures |= {"gib": facts.total_memory / 2**30, "sm": f"{facts.major}{facts.minor}"}
        figures |= {"processors": facts.multi_processor_count, "free_gib": bench.free_gib()}
    return {
        "device": describe_device(bench.device),
        "quick": bench.quick,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        **figures,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
