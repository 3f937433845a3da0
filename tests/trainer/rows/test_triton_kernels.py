"""Kernels for a GPU are what plain PyTorch is, which is what the compiled loops of a CPU are; and they compile."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from schemas.errors import InputError
from tests.builders import build_data
from tests.command import ROOT, environment
from tests.trainer.rows.kernel_cases import CASES, LABELS, OPTIMIZERS, WIDTHS, Case, differences
from trainer.one_vs_all import binary_step
from trainer.rows import kernels, torch_kernels
from trainer.rows.codes import BFLOAT16
from trainer.rows.kernels import name_kernels
from trainer.rows.matrix import DTYPES, RowMatrix, RowOptimizer

# Each type, optimizer and way to draw once; a hot label; widths beside a power of two.
QUICK = {
    *(f"bfloat16-{optimizer}-13-own" for optimizer in OPTIMIZERS),
    *("float32-adam-13-own", "bfloat16-adagrad-1-own", "bfloat16-sgd-96-shared", "float32-adagrad-64-hot"),
    *("bfloat16-adagrad-64-drawn", "bfloat16-adagrad-64-late", "bfloat16-adam-65-drawn", "bfloat16-adagrad-768-drawn"),
}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def program(module: str, *names: str, **extra: str) -> dict:
    """Run a module that prints one JSON object."""
    done = subprocess.run(
        [sys.executable, "-m", module, *names],
        env=environment(extra),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, list[float]]:
    """Return the differences of the cases to test; that kernels are interpreted is decided when Triton is loaded."""
    tests = [test for test in request.session.items if "interpreted" in getattr(test, "fixturenames", ())]
    names = [test.callspec.params["case"].name for test in tests]  # type: ignore[attr-defined]
    return program("tests.trainer.rows.kernel_cases", *names, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.name in QUICK else pytest.mark.slow) for case in CASES],
    ids=lambda case: case.name,
)
def test_interpreted_kernels_are_the_reference(case: Case, interpreted: dict[str, list[float]]) -> None:
    *others, rows = interpreted[case.name]
    assert max(others) < 2e-5
    # Sums differ in their last bits, which now and then decide which way a value is rounded.
    assert rows < {"float32": 2e-5, "bfloat16": 2**-7}[case.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_on_a_gpu_are_the_reference(case: Case) -> None:
    *others, rows = differences(case, torch.device("cuda"))
    assert max(others) < 1e-4
    assert rows < {"float32": 1e-4, "bfloat16": 2**-7}[case.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case.dimension in WIDTHS], ids=lambda case: case.name)
def test_kernels_on_a_gpu_give_the_same_bits_again(case: Case) -> None:
    from trainer.rows import triton_kernels

    first, *others = (case.run(triton_kernels, torch.device("cuda")) for _ in range(50))
    for other in others:
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, other, strict=True))


@needs_triton
@pytest.mark.parametrize(("method", "dimension"), [("adam", 96), ("adagrad", 96), ("adagrad", 1)])
def test_what_a_program_changes_it_stores_behind_a_barrier(
    method: str, dimension: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warp that is late would read the new scalar of its row."""
    from tests.trainer.rows import compile_kernels
    from trainer.rows import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"HAS_PAIRS": True, "METHOD": compile_kernels.METHODS[method], "DTYPE": BFLOAT16, "SPAN": 32}
    shape = triton_kernels.row_tiles(dimension)
    compiled = compile_kernels.compile_kernel(
        triton_kernels.update_kernel, dimension, torch.int16, 90, **constants, **shape
    )
    assert compile_kernels.stores_behind_barrier(compiled.asm["ptx"])
    without = re.sub(r".*\bbar\S+sync.*\n", "", compiled.asm["ptx"])
    assert not compile_kernels.stores_behind_barrier(without)


@pytest.mark.slow
@needs_triton
def test_kernels_compile_without_spills(tmp_path: Path) -> None:
    usage = program("tests.trainer.rows.compile_kernels", TRITON_CACHE_DIR=str(tmp_path))
    assert len(usage) == 3 * 2 * (2 + 2 * 10)
    assert {name: facts for name, facts in usage.items() if facts["spilled"]} == {}
    assert {name: facts for name, facts in usage.items() if not facts.get("behind", True)} == {}
    assert max(facts["registers"] for facts in usage.values()) <= 128


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_the_compiled_loops(dtype: str, optimizer: str) -> None:
    case = Case(dtype, optimizer, 13, "own")
    host, device = case.matrix(torch.device("cpu")), case.matrix(torch.device("cpu"))
    ids = np.array([3, 900, 7, 12])
    gradient = torch.randn(4, 13, generator=torch.Generator().manual_seed(2))
    for step in range(3):
        gathered = host.gather(ids)
        gathered.grad = gradient.clone()
        host.update(ids, gathered, 0.1, step)
        rule = device.rule(0.1, step)
        torch_kernels.update_rows(device.device_matrix(), rule, torch.from_numpy(ids), gradient)
    torch.testing.assert_close(device.weight, host.weight, rtol=1e-5 if dtype == "float32" else 0.01, atol=1e-6)
    for name, value in host.state.items():
        torch.testing.assert_close(device.state[name], value)


@pytest.mark.parametrize("columns", [1, 2, 63, 130])
def test_random_bits_are_those_of_a_cpu(columns: int) -> None:
    """A subtraction with one rounding, so that what is rounded to the narrow dtype is the same on both sides."""
    rows = torch.randn(50, columns, generator=torch.Generator().manual_seed(0))
    rows *= torch.logspace(-9, 6, 50)[:, None]
    ids, change = np.arange(50), torch.randn(50, columns, generator=torch.Generator().manual_seed(1)) * rows.abs()
    matrices = [RowMatrix(rows.to(torch.bfloat16), RowOptimizer("sgd"), first=77, seed=4) for _ in range(2)]
    gathered = matrices[0].gather(ids)
    gathered.grad = change
    matrices[0].update(ids, gathered, 1.0, 11)
    torch_kernels.update_rows(matrices[1].device_matrix(), matrices[1].rule(1.0, 11), torch.from_numpy(ids), change)
    assert torch.equal(matrices[0].weight.view(torch.int16), matrices[1].weight.view(torch.int16))


@pytest.mark.parametrize("pool", ["own", "shared"])
def test_a_step_on_a_device_is_that_of_a_cpu(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("float32", "adagrad", 16, pool)
    host, other = case.matrix(torch.device("cpu")), case.matrix(torch.device("cpu"))
    for step in range(3):
        x = torch.randn(16, case.queries, generator=torch.Generator().manual_seed(step)).T  # as a [CLS] state may lie
        candidates = case.candidates(step)
        loss, on_x = binary_step(x.contiguous(), host, candidates, 0.1, step, 0.5)
        with monkeypatch.context() as patch:
            patch.setenv("EXTREMIS_KERNELS", "reference")
            value, gradient = binary_step(x, other, candidates, 0.1, step, 0.5)
        assert float(value) == pytest.approx(float(loss), rel=1e-5)
        torch.testing.assert_close(gradient, on_x, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(other.weight, host.weight, rtol=1e-4, atol=1e-6)
    assert len(host.weight) == LABELS


@needs_triton
def test_what_fails_is_replaced_on_all_ranks_and_said_once(tmp_path: Path) -> None:
    data = build_data(str(tmp_path / "data"), rows={"train": 32, "test": 4}).layout.root
    runs = program("tests.trainer.rows.planted", data, str(tmp_path), TRITON_INTERPRET="1")
    used = {"numba": "numba", "right": "triton"}
    for plant, ranks in runs.items():
        for rank in ranks:
            assert rank["used"] == rank["recorded"] == used.get(plant, "triton, reference for update_rows")
            assert rank["loss"] == pytest.approx(runs["numba"][0]["loss"], rel=1e-4)
    said = {plant: [rank["said"] for rank in ranks] for plant, ranks in runs.items()}
    (wrong,), (not_compiled,) = said["wrong"].pop(0), said["not compiled"].pop(0)
    assert said == {"numba": [[]], "right": [[]], "wrong": [[]], "not compiled": []}
    assert re.search(r"update_rows on rank 1 differs by \d+ times the tolerance\. Please report", wrong)
    assert re.search(r"update_rows on rank 0 raises .*no_such_function.*\. Please report", not_compiled)


def test_kernels_are_decided_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_replaced", set(kernels._FUNCTIONS))
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    names = [(name_kernels(cpu), name_kernels(gpu))]
    for by_hand in ("reference", "triton"):
        monkeypatch.setenv("EXTREMIS_KERNELS", by_hand)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
        names.append((name_kernels(cpu), name_kernels(gpu)))
    assert names == [("numba", "reference"), ("reference", "reference"), ("numba", "triton")]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="Triton is not installed"):
        name_kernels(gpu)
    monkeypatch.setenv("EXTREMIS_KERNELS", "cuda")
    with pytest.raises(InputError, match=r"EXTREMIS_KERNELS = 'cuda': expected 'reference' or 'triton'"):
        name_kernels(cpu)
