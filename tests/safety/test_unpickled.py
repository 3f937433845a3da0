"""Nothing that came from a file is unpickled or run: over the syntax tree, and with files that would."""

import ast
import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.command import call, refused
from tests.pipelines.raw import write_tiny

ROOT = Path(__file__).parents[2]
PACKAGES = ("schemas", "search", "pipelines", "trainer", "scoring", "extremis")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
UNSAFE = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
# Modules that send functions to workers with a pickler of their own.
BETWEEN_OUR_PROCESSES: dict[str, set[str]] = {}


def risks(path: Path) -> set[str]:
    """List the calls in `path` that could run the content of a file."""
    unsafe: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            unsafe |= {alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            unsafe |= {name for name in names if set(name.split(".")) & (UNSAFE | {"pickler"})}
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if name in ("eval", "exec", "compile", "__import__", "os.system", "torch.load", "torch.jit.load"):
                unsafe.add(name)
            if name in ("np.load", "numpy.load") and options.get("allow_pickle") != "False":
                unsafe.add(name)
            if options.get("allow_pickle") == "True" or options.get("shell") == "True":
                unsafe.add(f"{name} with {options}")
            if name.endswith("from_pretrained") and options.get("trust_remote_code", "False") != "False":
                unsafe.add(f"{name} trusts remote code")
            if name == "AutoModel.from_pretrained" and options.get("use_safetensors") != "True":
                unsafe.add(f"{name} may unpickle")
    return unsafe


def test_no_module_unpickles_or_runs_what_it_reads() -> None:
    unsafe = {str(path.relative_to(ROOT)): risks(path) for path in FILES}
    assert {name: calls for name, calls in unsafe.items() if calls} == BETWEEN_OUR_PROCESSES


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from joblib import load",
        "import torch; torch.load(p)",
        "np.load(p)",
        "np.load(p, allow_pickle=True)",
        "eval(text)",
        "AutoModel.from_pretrained(n, use_safetensors=True, trust_remote_code=True)",
        "AutoModel.from_pretrained(n)",
        "subprocess.run(c, shell=True)",
    ],
)
def test_the_check_sees_what_it_should(code: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(code)
    assert risks(tmp_path / "module.py")


class Trap:
    """An object that runs code when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.place),)


def test_a_pickle_in_a_matrix_is_refused_and_not_run(tmp_path: Path) -> None:
    raw = write_tiny(tmp_path / "raw")
    for name in ("trn.json.gz", "tst.json.gz", "lbl.json.gz"):
        (raw / name).unlink()
    array = io.BytesIO()
    np.lib.format.write_array(array, np.asarray([Trap(tmp_path / "ran")], dtype=object), allow_pickle=True)
    for name in ("Y.trn.npz", "Y.tst.npz"):
        with zipfile.ZipFile(raw / name, "w") as out:
            for member in ("format", "shape", "indptr", "indices", "data"):
                out.writestr(f"{member}.npy", array.getvalue())
    for name in ("trn_X.txt", "tst_X.txt", "Y.txt"):
        (raw / name).write_text("a text\n")
    refused(call("shard", raw, tmp_path / "data", "--tokenizer", "train:300"), "npz")
    assert not (tmp_path / "ran").exists()


def test_a_model_that_is_a_pickle_is_refused_and_not_run(data: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shape = (
        '"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9'
    )
    (model / "config.json").write_text('{"model_type": "bert", ' + shape + "}")
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    options = ("encoder.kind=transformer", f"encoder.model={model}")
    done = call("train", "random", data, tmp_path / "run", *(word for option in options for word in ("--set", option)))
    refused(done, "encoder.model", "model.safetensors")
    assert not (tmp_path / "ran").exists()
