"""`python -m benchmarks.gpu` runs in all of its sections with nothing else installed, and goes on where it was cut."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from benchmarks.gpu.profiles import Span, busy_seconds, spans_of
from benchmarks.gpu.random_queries import HARD, POSITIVES, plan, random_batch
from benchmarks.gpu.results import FILE, Results
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.supervisor import supervise
from tests.command import ROOT, environment
from trainer.device import CPU
from trainer.stream.batch import Candidates

LISTS = [ROOT / "benchmarks" / "gpu" / name for name in ("machine.txt", "bundle.txt")]
# Finders of modules see nothing of what is not on a machine with a GPU.
BARE = """
import sys
NOT_THERE = {names!r}
class Finder:
    def __init__(self, finder):
        self._finder = finder
    def __getattr__(self, name):
        return getattr(self._finder, name)
    def find_spec(self, name, *more):
        return None if name.partition(".")[0] in NOT_THERE else self._finder.find_spec(name, *more)
sys.meta_path[:] = map(Finder, sys.meta_path)
"""
# Measures four things: of the second it dies, at the third it hangs.
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from benchmarks.gpu.results import Results
results, names = Results(Path(sys.argv[1])), ["one", "dies", "hangs", "four"]
def tell(**words):
    print(json.dumps(words), flush=True)
tell(plan=names)
for name in names:
    if name not in results.rows:
        tell(begun=name, seconds=1)
        if name == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == "hangs":
            time.sleep(60)
        results.add(name, {"ms": 1.0})
"""


def required(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]


def not_there() -> set[str]:
    """Modules of installed packages that neither the lists nor what they need in turn bring."""
    kept, pending = set[str](), [Requirement(line) for path in LISTS for line in required(path)]
    while pending:
        one = pending.pop()
        name = canonicalize_name(one.name)
        if name in kept:
            continue
        kept.add(name)
        for line in metadata.requires(name) or []:
            needed = Requirement(line)
            is_needed = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if is_needed:
                pending.append(needed)
    modules = metadata.packages_distributions()
    ours = {path.name for path in ROOT.iterdir()}
    return {name for name, dists in modules.items() if not {*map(canonicalize_name, dists)} & kept} - ours


def gpu(*arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_every_section_runs_with_nothing_else_and_goes_on_where_it_was_cut(data: Path, tmp_path: Path) -> None:
    site, out, bundle = tmp_path / "site", tmp_path / "out", tmp_path / "bundle"
    site.mkdir()
    bundle.mkdir()
    (bundle / "tate").symlink_to(data)
    names = not_there()
    assert {"faiss", "apache_beam", "zlib_ng", "orjson", "hypothesis"} <= names
    assert not {"torch", "numba", "pydantic", "tokenizers"} & names
    (site / "sitecustomize.py").write_text(BARE.format(names=names))
    bare = {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])}
    first = gpu("--out", out, "--bundle", bundle, **bare)
    while first.poll() is None and not ((out / FILE).exists() and b"losses" in (out / FILE).read_bytes()):
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    first.communicate()
    assert first.returncode == 128 + signal.SIGTERM
    before = (out / FILE).read_bytes()
    with (out / FILE).open("ab") as file:
        file.write(b'{"name": "half a li')

    printed, errors = gpu("--out", out, "--bundle", bundle, **bare).communicate()
    assert (out / FILE).read_bytes().startswith(before), "what was there is measured once"
    report = json.loads(printed.splitlines()[-1])
    assert report["gaps"] == {}, errors
    assert report["holds"]
    assert {name.partition(":")[0] for name in report["figures"]} == SECTIONS.keys()
    assert list(Results(out).rows) == list(report["figures"])
    assert report == json.loads((out / "report.json").read_text())
    assert [name for name, row in report["figures"].items() if "left_out" in row] == []
    assert report["figures"]["losses: bce own"]["of_cpu"] == 0
    lacking = {f"trainer.encoders.{name}": "onnxruntime" for name in ("onnx_inference", "onnx_export")}
    assert report["figures"]["versions"]["lacking"] == {"scoring.tuples": "orjson", **lacking}
    assert len(list(out.iterdir())) <= 8


def test_a_section_that_fails_fails_the_whole(tmp_path: Path) -> None:
    done = gpu("--out", tmp_path / "out", "--only", "tate", "--bundle", tmp_path)
    while done.poll() is None and not (tmp_path / "out" / FILE).exists():
        time.sleep(0.01)
    second = gpu("--out", tmp_path / "out")
    assert "another call writes there" in second.communicate()[1]
    assert second.returncode == 2
    report = json.loads(done.communicate()[0].splitlines()[-1])
    assert done.returncode == 1
    assert not report["holds"]
    assert "make gpu-bundle" in report["gaps"]["tate: astra"]
    refused = gpu("--out", tmp_path / "out", "--device", "cuda")
    assert "error: device: expected 'auto' or 'cpu'" in refused.communicate()[1]
    assert refused.returncode == 2


@pytest.mark.parametrize("minutes", [1, 0])
def test_what_dies_or_hangs_costs_no_other_measurement(minutes: int, tmp_path: Path) -> None:
    worker = [sys.executable, "-c", WORKER, str(tmp_path)]
    began = time.monotonic()
    planned = supervise(worker, tmp_path, began + 60 * minutes)
    assert time.monotonic() - began < 30
    if minutes:
        assert planned == ["one", "dies", "hangs", "four"]
        assert Results(tmp_path).rows == {
            "one": {"ms": 1.0},
            "dies": {"failed": f"its process ended with status {-signal.SIGSEGV}"},
            "hangs": {"failed": "it took more than 1 seconds"},
            "four": {"ms": 1.0},
        }
        Results(tmp_path).drop_failed()
        assert Results(tmp_path).rows.keys() == {"one", "four"}
    else:
        assert "failed" not in str(Results(tmp_path).rows)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30))))
def test_a_device_is_busy_while_anything_runs(pieces: list[tuple[int, int]]) -> None:
    spans = [Span("", start, start + length) for start, length in pieces]
    covered = {moment for start, length in pieces for moment in range(start, start + length)}
    assert busy_seconds(spans) == pytest.approx(len(covered) / 1e6)


def test_only_what_a_device_does_keeps_it_busy() -> None:
    def event(name: str, device: DeviceType, **more: bool) -> FunctionEvent:
        return FunctionEvent(0, name, 0, 10.0, 30.0, device_type=device, **more)

    events = [
        event("kernel", DeviceType.CUDA),
        event("cudaLaunchKernel", DeviceType.CPU),
        event("aten::mm", DeviceType.CPU),
        event("Optimizer.step", DeviceType.CUDA, is_user_annotation=True),
    ]
    assert spans_of(events) == [Span("kernel", 10.0, 30.0)]


def test_a_batch_has_each_label_once_a_query() -> None:
    batch = random_batch(7, 1000, 3, tokens=4, vocabulary=50)
    positives = batch.positives.reshape(7, POSITIVES)
    for own, hard in zip(positives, batch.hard, strict=True):
        assert len({*own, *hard}) == POSITIVES + HARD
        assert (own[1:] > own[:-1]).all()
    candidates = plan(batch, 1000, "own", CPU)
    assert isinstance(candidates, Candidates)
    assert candidates.pair_positive.sum() == 7 * POSITIVES


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_runs_in_the_environment_of_such_a_machine(tmp_path: Path) -> None:
    """Installs 5.7 GB once, into .venvs/gpu."""
    python = shutil.which("python3.12")
    if python is None:
        pytest.skip("there is no python3.12 on the PATH")
    venv = Path(sys.prefix)
    made = ("-o", f"{venv}/.demo", f"VENV={venv}", f"PYTHON312={python}")
    subprocess.run(["make", *made, "gpu-bundle", ".venvs/gpu/.done"], cwd=ROOT, env=environment(), check=True)
    size = sum(file.stat().st_size for file in (ROOT / "build" / "gpu").rglob("*") if file.is_file())
    assert size < 64 << 20
    command = [ROOT / ".venvs/gpu/bin/python", "-m", "benchmarks.gpu", "--device", "cpu", "--quick", "--out", tmp_path]
    own = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["holds"], (report["gaps"], done.stderr)
    assert {name.partition(":")[0] for name in report["figures"]} == SECTIONS.keys()
    assert report["figures"]["versions"]["faiss-cpu"] is None
    assert report["figures"]["tate: astra"]["P@1"] > 20
