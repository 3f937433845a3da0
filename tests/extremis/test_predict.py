"""`extremis export` and `predict`: the metrics of `evaluate` come out of the files, whatever the way there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file
from scipy.sparse import load_npz

import extremis
from extremis.reporting.records import open_run, sample_queries
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_column
from schemas.storage import join
from schemas.table import Table
from scoring import memory
from scoring.exported import Exported
from search.index import Factory
from tests.bert import write_bert
from tests.command import ROOT, TINY, call, environment, refused, sets
from tests.pipelines.raw import read_lines
from trainer.evaluation.evaluate import KS, label_statistics
from trainer.evaluation.metrics import Metrics
from trainer.inputs import Inputs
from trainer.recipe_files import applicable_overrides


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("served") / "run"
    done = call("train", "astra", data, run, *sets("order.batch=128", "train.epochs=2"))
    assert done.status == 0, done.err
    return run


@pytest.fixture(scope="module")
def exported(data: Path, run: Path) -> Path:
    out = run.parent / "exported"
    done = call("export", data, run, out, "--calibration-split", "test", "--json")
    assert done.status == 0, done.err
    return out


TREE = "papers.ngame.tree:fit"
FORBIDDEN = ("torch", "transformers", "apache_beam", "numba", "scipy")


def require_the_same_without_torch(export: Path, folder: Path) -> None:
    """`load` and the command in a process that cannot import FORBIDDEN predict as this process does.

    So do processes that are forked from it, and several threads at once.
    """
    texts = ["a landscape of the sea", "a man and a woman", "", "zzz"]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    code = (
        f"import concurrent.futures, json, multiprocessing, sys; sys.modules.update(dict.fromkeys({FORBIDDEN!r}))\n"
        "import extremis; from extremis.cli import main\n"
        f"model, texts = extremis.load({str(export)!r}), {texts!r}\n"
        "def predict(text): return [(of.key, of.score) for of in model.predict(text, max_labels=7)[0].labels]\n"
        "expected = [*map(predict, texts)] * 5\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool: assert pool.map(predict, texts * 5) == expected\n"
        "with concurrent.futures.ThreadPoolExecutor(4) as pool: assert [*pool.map(predict, texts * 5)] == expected\n"
        "found = model.predict(texts, max_labels=7)\n"
        "assert 'pandas' not in sys.modules\n"  # takes 0.2 s where it is there, as here
        "print(json.dumps([[(label.key, label.score) for label in each.labels] for each in found]), flush=True)\n"
        f"main(['predict', {str(export)!r}, 'texts.jsonl', 'p.parquet', '--max-labels', '7'])\n"
    )
    variables = environment({"PYTHONPATH": str(ROOT)})
    done = subprocess.run([sys.executable, "-c", code], env=variables, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded, written = json.loads(done.stdout.splitlines()[0]), pq.read_table(folder / "p.parquet").to_pylist()
    for one, row, expected in zip(loaded, written, extremis.load(export).predict(texts, max_labels=7), strict=True):
        for found in (one, [*zip(row["labels"], row["scores"], strict=True)]):
            assert [key for key, _ in found] == [label.key for label in expected.labels]
            scores = [label.score for label in expected.labels]
            np.testing.assert_allclose([score for _, score in found], scores, atol=1e-5)


def test_an_export_is_served_without_torch(exported: Path, tmp_path: Path) -> None:
    require_the_same_without_torch(exported, tmp_path)


def truth(data: Path, split: str = "test") -> pa.Table:
    """The split's keys and positives, in the order of storage."""
    url = DataLayout(str(data)).queries(split)
    return pa.concat_tables(Table.open(url).batches(["key", "label_ids"]))


def metrics(data: Path, top: np.ndarray) -> dict[str, float]:
    counted = Metrics(KS, label_statistics(DataLayout(str(data))).inverse_propensity)
    counted.update(top, list_column(truth(data), "label_ids"))
    return counted.result()


def ranked(matrix, k: int) -> np.ndarray:
    """Label ids [N, k] by (score descending, id ascending), as readers of such files rank them."""
    top = np.full((matrix.shape[0], k), -1)
    for row in range(matrix.shape[0]):
        part = slice(matrix.indptr[row], matrix.indptr[row + 1])
        order = np.lexsort((matrix.indices[part], -matrix.data[part]))[:k]
        top[row, : len(order)] = matrix.indices[part][order]
    return top


def test_what_is_exported(data: Path, run: Path, exported: Path) -> None:
    manifest = open_manifest(str(exported), "export")
    Table(str(exported), manifest).verify()
    files = {str(path.relative_to(exported)) for path in exported.rglob("*") if path.is_file()}
    assert files == {"_manifest.json", *(shard.path for shard in manifest.shards)}
    assert {"encoder/model.safetensors", "encoder/tokenizer.json", "calibration.json", "decision.toml"} <= files
    labels = pa.concat_tables(pq.read_table(path) for path in sorted((exported / "labels").iterdir()))
    assert labels.column_names == ["label_id", "key", "text", "frequency"]
    assert labels["label_id"].to_pylist() == list(range(manifest.rows))
    settings = "--calibration-split", "test", "--for", "serving"
    again = call("export", data, run, exported, *settings)
    assert "exported already" in again.err
    refused(
        call("export", data, run, exported, "--dtype", "float16"),
        str(exported),
        "made with other options",
        "--overwrite",
    )


def test_a_split_gives_the_metrics_of_evaluate(data: Path, run: Path, exported: Path, tmp_path: Path) -> None:
    expected = call("evaluate", data, run, "--json").json["metrics"]
    for name in ("p.npz", "p.trec", "p.parquet", "p.jsonl"):
        done = call("predict", exported, tmp_path / name, "--data", data, "--max-labels", "20", "--json")
        assert done.status == 0, done.err
        assert done.json["queries"] == 200
    matrix = load_npz(tmp_path / "p.npz")
    assert (matrix.dtype, matrix.shape) == (np.float32, (200, open_manifest(str(exported)).rows))
    assert matrix.has_sorted_indices
    assert metrics(data, ranked(matrix, 20)) == expected

    keys = truth(data)["key"].to_pylist()
    ids = {key: number for number, key in enumerate(label_keys(exported))}
    lines = [line.split() for line in (tmp_path / "p.trec").read_text().splitlines()]
    assert {line[1] for line in lines} == {"Q0"}
    assert [line[0] for line in lines] == [key for key in keys for _ in range(20)]
    assert [int(line[3]) for line in lines] == [*range(1, 21)] * 200
    run_ids = np.array([ids[line[2]] for line in lines]).reshape(200, 20)
    assert metrics(data, run_ids) == expected
    np.testing.assert_array_equal(run_ids, ranked(matrix, 20))

    table = pq.read_table(tmp_path / "p.parquet")
    assert table["label_ids"].to_pylist() == run_ids.tolist()
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [row["label_ids"] for row in rows] == run_ids.tolist()
    assert [row["labels"] for row in rows] == table["labels"].to_pylist()
    np.testing.assert_allclose([row["scores"] for row in rows], np.array(table["scores"].to_pylist()), rtol=1e-6)
    again = tmp_path / "again.npz"
    call("predict", exported, again, "--data", data, "--max-labels", "20")
    assert again.read_bytes() == (tmp_path / "p.npz").read_bytes()


class TestFused:
    @pytest.fixture(scope="class")
    def fused(self, data: Path, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        refused(call("evaluate", data, run, "--scores", "fused"), "has no fusion", "extremis fuse")
        for by in (TREE, "weights"):
            refused(call("fuse", data, run, "--by", by), "no split 'val'", "--validation", "data.holdout")
        done = call("fuse", data, run, "--by", TREE, "--split", "test", "--shortlist", "30", "--json")
        assert done.status == 0, done.err
        assert done.json["queries"] == 200
        out = tmp_path_factory.mktemp("fused") / "exported"
        done = call("export", data, run, out, "--scores", "fused", "--index", "IVF16,Flat", "--target-recall", "1")
        assert done.status == 0, done.err
        return out

    def test_each_way_to_score_is_one_of_its_own(self, data: Path, run: Path, fused: Path) -> None:
        reports = {
            by: call("evaluate", data, run, "--scores", by, "--json").json
            for by in ("classifier", "labels", "sum", "fused")
        }
        assert [report["scores"] for report in reports.values()] == [*reports]
        values = {by: report["metrics"]["P@1"] for by, report in reports.items()}
        assert len({*values.values()}) == 4
        assert values["fused"] > values["classifier"]  # it was fitted on these very queries

    def test_both_added_are_one_vector_a_label(self, data: Path, run: Path, tmp_path: Path) -> None:
        expected = call("evaluate", data, run, "--scores", "sum", "--json").json["metrics"]
        assert call("export", data, run, tmp_path / "summed", "--scores", "sum").status == 0
        assert (
            call("predict", tmp_path / "summed", tmp_path / "p.parquet", "--data", data, "--max-labels", "20").status
            == 0
        )
        counted = metrics(data, np.array(pq.read_table(tmp_path / "p.parquet")["label_ids"].to_pylist()))
        assert counted == pytest.approx(expected, abs=0.5)  # the last bit of a sum may decide between two labels
        assert not (tmp_path / "summed" / "label-texts").exists()

    @pytest.mark.parametrize("indexed", [True, False])
    def test_an_export_predicts_as_evaluate_scores(
        self, data: Path, run: Path, fused: Path, tmp_path: Path, indexed: bool
    ) -> None:
        expected = call("evaluate", data, run, "--scores", "fused", "--json").json["metrics"]
        exact = () if indexed else ("--exact",)
        done = call("predict", fused, tmp_path / "p.parquet", "--data", data, "--max-labels", "20", *exact)
        assert done.status == 0, done.err
        counted = metrics(data, np.array(pq.read_table(tmp_path / "p.parquet")["label_ids"].to_pylist()))
        assert counted == (pytest.approx(expected, abs=0.3) if indexed else expected)
        Table.open(str(fused), "export").verify()

    def test_it_is_served_without_torch(self, fused: Path, tmp_path: Path) -> None:
        require_the_same_without_torch(fused, tmp_path)


RECIPES = {"classifier": "astra", "label-encoder": "dexml"}
LINEAR = {"classifier": (), "label-encoder": ("--linear", "0")}  # with a ranker, and by votes without one


class TestWeights:
    """Scores fused by weights: with votes of training points, and with labels' texts where they are not the vectors."""

    @pytest.fixture(scope="class", params=RECIPES)
    def fused(self, request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A folder with run/ and exported/."""
        folder, recipe = tmp_path_factory.mktemp("weights"), RECIPES[request.param]
        changes = applicable_overrides(
            recipe,
            [*TINY, "order.batch=128", "train.epochs=2", "train.seed=1", "data.holdout=0.1", "encoder.dropout=0"],
        )
        options = [word for change in changes for word in ("--set", change)]
        for arguments in (
            ("train", recipe, data, folder / "run", *options),
            ("fuse", data, folder / "run", "--shortlist", "30", *LINEAR[request.param]),
            ("export", data, folder / "run", folder / "exported", "--scores", "fused", "--calibration-split", "test"),
        ):
            done = call(*arguments)
            assert done.status == 0, done.err
        return folder

    def test_an_export_predicts_to_the_digit_as_evaluate_scores(self, data: Path, fused: Path, tmp_path: Path) -> None:
        run, exported = fused / "run", fused / "exported"
        Table.open(str(exported), "export").verify()
        assert (exported / "memory").exists()
        has_ranker = json.loads((exported / "fusion-weights.json").read_text())["linear"] > 0
        assert (
            (exported / "linear.safetensors").exists() == has_ranker == ("astra" in (run / "config.toml").read_text())
        )
        alone, expected = (
            call("evaluate", data, run, "--scores", by, "--json").json["metrics"] for by in ("classifier", "fused")
        )
        assert alone != expected
        done = call("predict", exported, tmp_path / "p.parquet", "--data", data, "--max-labels", "20")
        assert done.status == 0, done.err
        assert metrics(data, np.array(pq.read_table(tmp_path / "p.parquet")["label_ids"].to_pylist())) == expected

    def test_it_is_served_without_torch(self, fused: Path, tmp_path: Path) -> None:
        require_the_same_without_torch(fused / "exported", tmp_path)

    def test_scorers_say_by_themselves_what_is_fused(self, fused: Path) -> None:
        serving = Exported.open(str(fused / "exported")).serving
        inputs = Inputs(Ragged.from_counts(np.array([5, 6, 7, 8, 9], np.uint32), np.array([3, 2])))
        scores, ids = serving.rank(inputs, 6)
        assert serving.fused is not None
        explained = [[serving.explain(inputs.slice(row, row + 1), label) for label in ids[row]] for row in range(2)]
        sums = [[sum(terms.values()) for terms, _ in each] for each in explained]
        np.testing.assert_allclose(sums, scores, atol=1e-5)
        assert any(of["points"] for each in explained for _, of in each)

    def test_what_was_held_out_can_be_scored_by_name(self, data: Path, fused: Path) -> None:
        done = call("evaluate", data, fused / "run", "--split", "holdout", "--scores", "fused", "--json")
        assert (done.status, done.json["queries"]) == (0, 145)
        alone = call("evaluate", data, fused / "run", "--split", "holdout", "--scores", "classifier", "--json")
        assert done.json["metrics"]["nDCG@5"] >= alone.json["metrics"]["nDCG@5"]

    def test_fused_scores_stand_for_the_run_wherever_none_are_named(
        self, data: Path, fused: Path, tmp_path: Path
    ) -> None:
        run = fused / "run"
        by_default, named, alone = (
            call("evaluate", data, run, *words, "--json").json
            for words in ((), ("--scores", "fused"), ("--step", "newest", "--scores", "classifier"))
        )
        # Only the evaluation without options is kept in the run.
        assert by_default["labels"].pop("file")
        assert by_default.pop("record")
        assert named["labels"].pop("file") is named.pop("record") is None
        assert by_default == named
        assert (by_default["scores"], alone["scores"]) == ("fused", "classifier")
        assert by_default["metrics"] != alone["metrics"]
        assert call("export", data, run, tmp_path / "out").status == 0
        done = call(
            "predict", tmp_path / "out", tmp_path / "p.parquet", "--data", data, "--max-labels", "3", "--no-filter"
        )
        assert done.status == 0, done.err
        predicted = {row["key"]: row for row in pq.read_table(tmp_path / "p.parquet").to_pylist()}
        layout = DataLayout(str(data))
        opened = open_run(str(run), "run", Table.open(layout.root, "data").manifest)
        assert opened.evaluations["test"]["metrics"] == by_default["metrics"]
        for query in sample_queries(layout, [opened], ["test"], 20, predict=True).queries:
            view, row = query["runs"][0], predicted[query["key"]]
            shown = dict(view["predictions"])
            assert [shown[label] for label in row["label_ids"]] == pytest.approx(row["scores"], rel=1e-3)
            for label, score in zip(query["positives"], view["positives"], strict=True):
                assert shown.get(label, score) == score

    def test_it_is_fitted_again_within_another_budget(self, data: Path, fused: Path) -> None:
        done = call("fuse", data, fused / "run", "--memory", "20kB", "--linear", "0", "--json")
        assert done.status == 0, done.err
        assert 0 < done.json["memory_bytes"] <= 20_000
        assert re.search(r"[\d,]+ points, index exact, [\d.]+ KiB in memory", done.err)
        refused(call("fuse", data, fused / "run", "--memory", "much"), "much")

    def test_with_an_index_too_an_export_predicts_as_evaluate_scores(
        self, data: Path, fused: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: pa.Table
    ) -> None:
        monkeypatch.setattr(memory, "choose", lambda *arguments, **named: Factory("IVF4,Flat"))
        monkeypatch.setattr(Factory, "query_cost", lambda factory, *arguments: float(factory.exact))
        run, out = fused / "run", tmp_path / "out"
        done = call("fuse", data, run, "--linear", "0", "--json")
        assert done.status == 0, done.err
        assert "index IVF4,Flat with recall" in done.err
        assert done.json["memory"]["measured"]["recall"] >= 0.9
        assert "IVF4,Flat" in call("inspect", next((run / "fusion").iterdir())).out
        expected = call("evaluate", data, run, "--json").json["metrics"]
        assert call("export", data, run, out).status == 0
        assert (out / "memory" / "index.faiss").exists()
        assert call("predict", out, tmp_path / "p.parquet", "--data", data, "--max-labels", "20").status == 0
        assert metrics(data, np.array(pq.read_table(tmp_path / "p.parquet")["label_ids"].to_pylist())) == expected
        some = texts["text"].to_pylist()[:20]
        model = extremis.load(str(out))
        alone = [model.predict([text], max_labels=5)[0] for text in some]
        for one, of_batch in zip(alone, model.predict(some, max_labels=5), strict=True):
            assert [label.score for label in one.labels] == pytest.approx(
                [label.score for label in of_batch.labels], rel=1e-4
            )


def label_keys(exported: Path) -> list[str]:
    labels = pa.concat_tables(pq.read_table(path) for path in sorted((exported / "labels").iterdir()))
    return labels["key"].to_pylist()


@pytest.fixture(scope="module")
def texts(raw: Path, data: Path) -> pa.Table:
    """The raw texts of the test split by key."""
    records = read_lines(raw / "tst.json.gz")
    joined = ["\n".join(filter(None, (record["title"], record.get("content", "")))) for record in records]
    return pa.table({"key": [record["uid"] for record in records], "text": joined})


def test_texts_are_predicted_as_the_sharded_ones(data: Path, exported: Path, texts: pa.Table, tmp_path: Path) -> None:
    call("predict", exported, tmp_path / "split.parquet", "--data", data, "--max-labels", "5")
    split = pq.read_table(tmp_path / "split.parquet")
    expected = dict(zip(split["key"].to_pylist(), split["labels"].to_pylist(), strict=True))
    rows = texts.to_pylist()
    half = tmp_path / "half"
    half.mkdir()
    for number, part in enumerate((rows[:90], rows[90:])):
        (half / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    pq.write_table(texts.rename_columns(["id", "query"]), tmp_path / "in.parquet")
    (tmp_path / "in.txt").write_text("".join(row["text"].replace("\n", " ") + "\n" for row in rows))
    predicted = {}
    for name, source, more in (
        ("jsonl", half, ("--batch", "64")),
        ("glob", half / "*.jsonl", ("--batch", "1")),
        ("parquet", tmp_path / "in.parquet", ("--fields", "key=id,text=query")),
        ("text", tmp_path / "in.txt", ()),
    ):
        done = call("predict", exported, source, tmp_path / f"{name}.parquet", "--max-labels", "5", *more)
        assert done.status == 0, done.err
        predicted[name] = pq.read_table(tmp_path / f"{name}.parquet")
    for name in ("jsonl", "glob", "parquet"):
        got = dict(zip(predicted[name]["key"].to_pylist(), predicted[name]["labels"].to_pylist(), strict=True))
        assert got == expected, name
        assert predicted[name]["key"].to_pylist() == texts["key"].to_pylist()
    assert predicted["text"]["key"].to_pylist() == [str(number) for number in range(200)]
    assert predicted["text"]["labels"].to_pylist() == predicted["jsonl"]["labels"].to_pylist()


def test_all_labels_above_a_limit_are_given(data: Path, exported: Path, tmp_path: Path) -> None:
    """On the rows that the calibration was learned from."""
    stated = json.loads((exported / "calibration.json").read_text())
    assert (stated["split"], stated["precision"]["texts"]) == ("test", 192)  # some texts occur twice
    scores, bounds = (np.array(stated["precision"][name]) for name in ("scores", "bounds"))
    asked = float(bounds[len(bounds) // 2])
    done = call("predict", exported, tmp_path / "p.npz", "--data", data, "--precision", str(asked), "--json")
    matrix = load_npz(tmp_path / "p.npz")
    assert matrix.data.min() == pytest.approx(scores[len(bounds) // 2], abs=1e-5)
    assert done.json["predictions"] == matrix.nnz
    every = call("predict", exported, tmp_path / "q.npz", "--data", data, "--max-labels", "100000").status
    assert every == 0
    assert (load_npz(tmp_path / "q.npz") > matrix.data.min() - 1e-6).nnz == pytest.approx(matrix.nnz, abs=1)
    positives = truth(data)["label_ids"].to_pylist()
    right = sum(label in positives[row] for row, label in zip(*matrix.nonzero(), strict=True))
    assert right / matrix.nnz > asked
    refused(
        call("predict", exported, tmp_path / "r.npz", "--data", data, "--precision", "0.999"),
        "--precision 0.999: the highest precision that this model meets on its 192 held-out texts",
        f"is {bounds[-1]:.3f}",
    )
    with pytest.raises(InputError, match=r"min_probability=1: no label of a text has a probability above"):
        extremis.load(exported).predict(["a ship"], min_probability=1)


@pytest.mark.parametrize(("index", "dtype"), [("IVF16,Flat", "float32"), ("IVF8,PQ3x4", "float16")])
def test_an_index_finds_what_exact_search_does(data: Path, run: Path, tmp_path: Path, index: str, dtype: str) -> None:
    out = tmp_path / "exported"
    done = call(
        "export",
        data,
        run,
        out,
        "--index",
        index,
        "--target-recall",
        0.95,
        "--dtype",
        dtype,
        "--calibration-split",
        "none",
        "--json",
    )
    assert done.status == 0, done.err
    assert done.json["index"]["factory"] == index
    assert done.json["calibration"] is None
    assert "no probabilities: --calibration-split none" in done.err
    for name, more in (("a.npz", ()), ("e.npz", ("--exact",))):
        assert call("predict", out, tmp_path / name, "--data", data, "--max-labels", "10", *more).status == 0
    approximate, exact = (ranked(load_npz(tmp_path / name), 10) for name in ("a.npz", "e.npz"))
    recall = np.mean([len({*a} & {*e}) / 10 for a, e in zip(approximate.tolist(), exact.tolist(), strict=True)])
    assert recall > 0.9


def test_at_another_place(data: Path, run: Path, texts: pa.Table, tmp_path: Path) -> None:
    """Export and input behind a URL; files are fetched and compared."""
    import fsspec

    out, here = "memory://served/exported", tmp_path / "exported"
    arguments = ("--scores", "classifier", "--calibration-split", "test", "--json")
    first, second = (call("export", data, run, place, *arguments).json["digest"] for place in (out, here))
    assert first == second
    with fsspec.open("memory://served/in/part.jsonl", "w") as file:
        file.write("".join(json.dumps(row) + "\n" for row in texts.to_pylist()))
    for place, source, target in (
        (out, "memory://served/in/*.jsonl", "memory://served/p.npz"),
        (str(here), "memory://served/in", str(tmp_path / "p.npz")),
    ):
        done = call("predict", place, source, target)
        assert done.status == 0, done.err
    with fsspec.open("memory://served/p.npz", "rb") as file:
        assert file.read() == (tmp_path / "p.npz").read_bytes()
    shard = open_manifest(out).shards[-1].path
    with fsspec.open(join(out, shard), "wb") as file:
        file.write(b"x" * open_manifest(out).shards[-1].bytes)
    refused(call("predict", out, "memory://served/in", tmp_path / "q.npz"), shard, "damaged", "Export the run again")


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("in.jsonl", b'{"key": "a", "text": "x"}\n{"key": "b"\n', ("in.jsonl, line 2: not JSON", "Fix the row")),
            ("in.jsonl", b'{"key": "a"}\n', ("in.jsonl, line 1: the field 'text' is missing",)),
            ("in.jsonl", b"", ("in.jsonl: the file is empty",)),
            ("in.txt", b"fine\n\xff\xfe\xfa\n", ("in.txt, line 2: not UTF-8 text",)),
            ("in.xml", b"a,b\n", ("in.xml: unknown file extension", "--form")),
            (
                "in.csv",
                b"a,b\nx,y\n",
                ("in.csv: no column 'title' or 'text' or 'content'", "found: 'a', 'b'", "--fields"),
            ),
            ("in.parquet", b"nothing of the kind", ("in.parquet: not a Parquet file", "Copy the file again")),
        ],
    )
    def test_bad_input(self, exported: Path, tmp_path: Path, name: str, content: bytes, words: tuple[str, ...]) -> None:
        (tmp_path / name).write_bytes(content)
        refused(call("predict", exported, tmp_path / name, tmp_path / "out.jsonl"), *words)
        assert [path.name for path in tmp_path.iterdir()] == [name]

    def test_wrong_use(self, data: Path, run: Path, exported: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.npz"
        refused(call("predict", exported, tmp_path / "nowhere", out), "no input here", "Expected a file")
        refused(call("predict", exported, out), "expected INPUT and OUT")
        refused(call("predict", exported, "in", out, "--data", data), "expected OUT alone")
        refused(call("predict", exported, tmp_path / "out", "--data", data), "unknown file ending", "--to")
        refused(call("predict", run, out, "--data", data), f"{run}: expected an export, got a run")
        refused(call("predict", data, out, "--data", data), "expected a table of kind export, got data")
        refused(call("predict", exported, out, "--data", data, "--split", "dev"), "no split 'dev'")
        both = ("--min-probability", "1", "--precision", "0.5")
        refused(call("predict", exported, out, "--data", data, *both), "give only one of the two")
        refused(call("export", data, run, data), "the command reads this", "Give another path")
        refused(
            call("export", data, run, tmp_path / "e", "--index", "IVF9,Nonsense"), "IVF9,Nonsense", "cannot be built"
        )
        refused(
            call("export", data, run, tmp_path / "e", "--precision", "half"),
            "--precision: expected a valid number, got 'half'",
        )
        assert not out.exists()
        assert not (tmp_path / "e" / "_manifest.json").exists()

    def test_a_damaged_export(self, data: Path, exported: Path, tmp_path: Path) -> None:
        import shutil

        broken = shutil.copytree(exported, tmp_path / "broken")
        vectors = next((broken / "vectors").iterdir())
        vectors.write_bytes(vectors.read_bytes()[:-7])
        refused(call("predict", broken, tmp_path / "p.npz", "--data", data), vectors.name, "damaged", "Export")
        vectors.unlink()
        refused(call("predict", broken, tmp_path / "p.npz", "--data", data), vectors.name, "missing", "Export")
        (broken / "_manifest.json").unlink()
        refused(call("predict", broken, tmp_path / "p.npz", "--data", data), "unfinished table")

    def test_other_data(self, exported: Path, raw: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        assert call("shard", raw, other, "--tokenizer", "train:1000", "--seed", "1").status == 0
        refused(call("predict", exported, tmp_path / "p.npz", "--data", other), "a run on data with digest", "as INPUT")


class TestDualEncoder:
    """A head that encodes labels is exported as the embeddings of their texts."""

    SMALL = ("order.batch=128", "train.epochs=1", "train.threads=1")

    def exported(self, data: Path, folder: Path, *choices: str) -> Path:
        changes = [word for choice in (*self.SMALL, *choices) for word in ("--set", choice)]
        done = call("train", "dexml", data, folder / "run", *changes)
        assert done.status == 0, done.err
        done = call("export", data, folder / "run", folder / "out", "--calibration-split", "none")
        assert done.status == 0, done.err
        return folder / "out"

    @pytest.mark.parametrize("shared", [True, False])
    def test_predicts_what_evaluate_counts(self, data: Path, tmp_path: Path, shared: bool) -> None:
        bag = ("encoder.dimension=8", "encoder.hidden=8", "encoder.buckets=512")
        out = self.exported(data, tmp_path, *bag, f"head.shared={str(shared).lower()}")
        assert (out / "label-encoder").exists() is not shared
        expected = call("evaluate", data, tmp_path / "run", "--json").json["metrics"]
        assert call("predict", out, tmp_path / "p.npz", "--data", data, "--max-labels", "20").status == 0
        assert metrics(data, ranked(load_npz(tmp_path / "p.npz"), 20)) == pytest.approx(
            expected, abs=0.51
        )  # a tie of 200

    @pytest.mark.parametrize("shared", [True, False])
    def test_sentence_transformers_encodes_labels_to_their_vectors(
        self, data: Path, tmp_path: Path, shared: bool
    ) -> None:
        from sentence_transformers import SentenceTransformer

        vocabulary = open_manifest(DataLayout(str(data)).tokenizer, "tokenizer").parameters["vocabulary"]
        bert = write_bert(tmp_path / "bert", vocabulary, layers=1)
        transformer = ("encoder.kind=transformer", f"encoder.model={bert}", "encoder.dimension=16", "encoder.lr=0.01")
        few = ("data.label_texts=false", "negatives.pool=batch", "encoder.max_tokens=8", "train.epochs=1")
        choices = (*transformer, *few, f"head.shared={str(shared).lower()}")
        out = self.exported(data, tmp_path, *choices)
        labels = pq.read_table(out / "labels")["text"].to_pylist()[:50]
        vectors = load_file(out / "vectors" / "part-00000-of-00001.safetensors")["weight"][:50]
        place = out / ("encoder" if shared else "label-encoder")
        z = SentenceTransformer(str(place), device="cpu").encode(labels)
        np.testing.assert_allclose(z, vectors.numpy(), rtol=1e-3, atol=1e-5)
        if not shared:
            x = SentenceTransformer(str(out / "encoder"), device="cpu").encode(labels)
            assert np.abs(x - z).max() > 1e-3  # queries have another
