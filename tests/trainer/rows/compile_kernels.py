"""Compile the kernels for GPUs, which needs none: registers, and bytes that are spilled, of each, as one JSON object.

Arguments have the types that Triton's own launcher gives them: pointers and widths that 16 divides are known to be.

    python -m tests.trainer.rows.compile_kernels [--dimensions 64,769] [--architectures 80,90,100] [--dtypes bfloat16]
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from trainer.rows import codes, triton_kernels

ARCHITECTURES = (80, 90, 100)
DTYPES = {
    "float32": (codes.FLOAT32, torch.int32),
    "bfloat16": (codes.BFLOAT16, torch.int16),
}
METHODS = {"sgd": codes.SGD, "momentum": codes.MOMENTUM, "adagrad": codes.ADAGRAD, "adam": codes.ADAM}
DIMENSIONS = (64, 769)
_TYPES = {
    **dict.fromkeys(("x", "loss", "slopes", "on_x", "weight", "margins", "first", "second"), torch.float32),
    **dict.fromkeys(("label", "starts", "query", "ids"), torch.int32),
    **dict.fromkeys(("scalar", "dense", "sums", "scores", "rate", "keep"), torch.float32),
    **dict.fromkeys(("order", "key"), torch.int64),
}
_NUMBERS = {"origin": 1 << 40, "rows": 96, "count": 96, "queries": 512, "labels": 1 << 16}


def compile_kernel(kernel: Any, dimension: int, vectors: torch.dtype, architecture: int, **constants: int) -> Any:
    """Compile a kernel as its first call on such a GPU does."""
    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    types = {**_TYPES, "vectors": vectors, "out": torch.bfloat16}
    given = {name: torch.empty(16, dtype=types[name]) for name in kernel.arg_names if name in types}
    rest = {**_NUMBERS, "D": dimension, **constants}
    given |= {name: rest.get(name, 0.5) for name in kernel.arg_names if name not in types}
    options = {"num_warps": constants["num_warps"]}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**given, **options)
    parsed, signature, constexprs, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=target, options=parsed.__dict__)


def usage(compiled: Any) -> dict[str, int]:
    """Return registers, and spilled bytes a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        program = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
        told = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, *re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", told))
    return {"registers": registers, "spilled": stack + local}


def stores_behind_barrier(ptx: str) -> bool:
    """Tell whether all loads come before a barrier, and all stores after it."""
    kinds = re.findall(r"(ld\.global|st\.global|bar(?:rier)?\.(?:cta\.)?(?:warp\.)?sync)", ptx)
    loads = [place for place, kind in enumerate(kinds) if kind == "ld.global"]
    stores = [place for place, kind in enumerate(kinds) if kind == "st.global"]
    return "sync" in " ".join(kinds[loads[-1] + 1 : stores[0]])


def compile_all(dimensions: list[int], architectures: list[int], names: list[str]) -> dict[str, dict[str, int]]:
    """Compile every kernel in every dtype, shape and method."""
    figures = {}
    for architecture in architectures:
        for dimension in dimensions:
            kernels = {
                "spans": (triton_kernels.span_kernel, "float32", {**triton_kernels.span_tiles(dimension)}),
                "pool": (triton_kernels.pool_kernel, "float32", {**triton_kernels.POOL_TILE}),
            }
            for dtype in names:
                constants = {"DTYPE": DTYPES[dtype][0]}
                for margins in (True, False):
                    tiles = {**constants, "HAS_MARGINS": margins, **triton_kernels.score_tiles(dimension)}
                    name = f"{dtype} score{' with margins' if margins else ''}"
                    kernels[name] = triton_kernels.score_kernel, dtype, tiles
                shape = triton_kernels.row_tiles(dimension)
                for method, code in METHODS.items():
                    for paired in (True, False):
                        kernels[f"{dtype} update {method}{'' if paired else ' without pairs'}"] = (
                            triton_kernels.update_kernel, dtype,
                            {**constants, "HAS_PAIRS": paired, "METHOD": code, **shape},
                        )  # fmt: skip
            for name, (kernel, dtype, constants) in kernels.items():
                span = {"SPAN": triton_kernels._SPAN} if "SPAN" in kernel.arg_names else {}
                compiled = compile_kernel(kernel, dimension, DTYPES[dtype][1], architecture, **span, **constants)
                figures[f"sm_{architecture} D={dimension} {name}"] = {
                    **usage(compiled),
                    **({"behind": stores_behind_barrier(compiled.asm["ptx"])} if "update" in name else {}),
                }
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dimensions", default=",".join(map(str, DIMENSIONS)))
    parser.add_argument("--architectures", default=",".join(map(str, ARCHITECTURES)))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    arguments = parser.parse_args()
    widths, targets = ([int(n) for n in given.split(",")] for given in (arguments.dimensions, arguments.architectures))
    print(json.dumps(compile_all(widths, targets, arguments.dtypes.split(","))))
