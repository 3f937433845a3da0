"""Compile the kernels for GPUs, which needs none: registers, and bytes that are spilled, of each, as one JSON object.

python -m tests.trainer.rows.compile_kernels
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainer.rows import kernels, triton_kernels

ARCHITECTURES = (80, 90)
FORMS = {
    "float32": (kernels.FLOAT32, "*i32"),
    "bfloat16": (kernels.BFLOAT16, "*i16"),
    "float16": (kernels.FLOAT16, "*i16"),
}
METHODS = {"sgd": kernels.SGD, "momentum": kernels.MOMENTUM, "adagrad": kernels.ADAGRAD, "adam": kernels.ADAM}
DIMENSIONS = (64, 769)
_FLOATS = ("x", "loss", "slopes", "on_x", "weight", "first", "second", "scalar", "dense")
_TYPES = {
    **dict.fromkeys(_FLOATS, "*fp32"),
    **dict.fromkeys(("label", "starts", "query", "order"), "*i32"),
    **dict.fromkeys(("scale", "rate", "keep", "beta1", "beta2", "eps", "log1", "log2"), "fp32"),
    **dict.fromkeys(("origin", "key"), "i64"),
    "ids": "*i64",
    "rows": "i32",
    "D": "i32",
}


def compile_kernel(
    kernel: Any, constants: dict[str, Any], vectors: str, warps: int, architecture: int
) -> dict[str, int]:
    """Return registers, and spilled bytes a thread."""
    signature = {name: {**_TYPES, "vectors": vectors}.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        program = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
        usage = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, *re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage))
    return {"registers": registers, "spilled": stack + local}


def compile_all() -> dict[str, dict[str, int]]:
    """Compile every kernel in every form and shape."""
    usage = {}
    for architecture in ARCHITECTURES:
        for form, (number, vectors) in FORMS.items():
            for dimension in DIMENSIONS:
                name = f"sm_{architecture} {form} D={dimension}"
                shape = triton_kernels.tiles(dimension)
                warps = shape.pop("num_warps")
                usage[f"{name} score"] = compile_kernel(
                    triton_kernels.score_kernel, {"FORM": number, **shape}, vectors, warps, architecture
                )
                shape = triton_kernels.tiles(dimension, rows=True)
                warps = shape.pop("num_warps")
                for method, code in METHODS.items():
                    constants = {"HAS_PAIRS": True, "METHOD": code, "FORM": number, **shape}
                    usage[f"{name} update {method}"] = compile_kernel(
                        triton_kernels.update_kernel, constants, vectors, warps, architecture
                    )
    return usage


if __name__ == "__main__":
    print(json.dumps(compile_all()))
