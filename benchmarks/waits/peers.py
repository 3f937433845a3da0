"""One text through other tools, trained on a raw folder; for any Python that has them, without Extremis.

    PYTHON benchmarks/waits/peers.py RAW [--rows N]

Prints a JSON object per tool: seconds of training, and milliseconds from a text to its ten best labels, of texts one by
one. Bonsai and XR-Linear read scikit-learn's TF-IDF of words and word pairs. Annif's tokenizer is replaced by a regular
expression, because its data are downloaded at the first use.
"""

import argparse
import contextlib
import gzip
import importlib.util
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

K, TEXTS = 10, 1000
Suggest = Callable[[str], object]


class Rows(NamedTuple):
    texts: list[str]
    positives: list[list[int]]
    labels: list[str]
    asked: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("raw", type=Path, help="a folder in the XC repository's JSON form")
    parser.add_argument("--rows", type=int, help="only the first training rows")
    options = parser.parse_args()
    rows = read(options.raw, options.rows)
    for name, (module, train) in TOOLS.items():
        if importlib.util.find_spec(module) is None:
            print(json.dumps({"tool": name, "missing": module}), flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder, quiet():
            began = time.perf_counter()
            suggest = train(rows, Path(folder))
            trained = time.perf_counter() - began
            waits = sorted(wait(suggest, text) for text in [*rows.asked[:50], *rows.asked][50:])
        figures = {"p50_ms": waits[len(waits) // 2], "p99_ms": waits[len(waits) * 99 // 100]}
        print(json.dumps({"tool": name, "train_s": round(trained, 1), **figures}), flush=True)


def read(raw: Path, count: int | None) -> Rows:
    def of(name: str) -> list[dict[str, Any]]:
        with gzip.open(raw / f"{name}.json.gz", "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def text(row: dict[str, Any]) -> str:
        return " ".join(f"{row.get('title', '')} {row.get('content', '')}".split())

    train = of("trn")[:count]
    asked = [text(row) for row in of("tst")[:TEXTS]]
    return Rows([*map(text, train)], [row["target_ind"] for row in train], [*map(text, of("lbl"))], asked)


def wait(suggest: Suggest, text: str) -> float:
    """Return the milliseconds of one text."""
    began = time.perf_counter()
    suggest(text)
    return round(1000 * (time.perf_counter() - began), 3)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Send standard output of the tools, also of their C++ parts, to standard error."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def features(rows: Rows) -> tuple[Any, Any, Any]:
    """Return a fitted vectorizer, the rows' TF-IDF, and their labels, as sparse matrices."""
    import numpy as np
    from scipy.sparse import csr_matrix
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(ngram_range=(1, 2), dtype=np.float32)
    ends = np.cumsum([0, *map(len, rows.positives)])
    ids = np.concatenate([np.array(each, np.int32) for each in rows.positives])
    y = csr_matrix((np.ones(len(ids), np.float32), ids, ends), (len(rows.texts), len(rows.labels)))
    return vectorizer, vectorizer.fit_transform(rows.texts), y


def train_bonsai(rows: Rows, folder: Path) -> Suggest:
    import omikuji
    from sklearn.datasets import dump_svmlight_file

    (vectorizer, x, y), file = features(rows), folder / "train.txt"
    with file.open("wb") as out:
        out.write(f"{x.shape[0]} {x.shape[1]} {len(rows.labels)}\n".encode())
        dump_svmlight_file(x, y, out, multilabel=True)
    settings = omikuji.Model.default_hyper_param()
    settings.cluster_balanced, settings.cluster_k, settings.max_depth = False, 100, 3
    model = omikuji.Model.train_on_data(str(file), settings, n_threads=len(os.sched_getaffinity(0)))

    def suggest(text: str) -> object:
        row = vectorizer.transform([text])
        return model.predict([*zip(row.indices.tolist(), row.data.tolist(), strict=True)], top_k=K)

    return suggest


def train_xr_linear(rows: Rows, folder: Path) -> Suggest:
    from pecos.xmc import Indexer, LabelEmbeddingFactory
    from pecos.xmc.xlinear.model import XLinearModel

    vectorizer, x, y = features(rows)
    of_labels = LabelEmbeddingFactory.create(y, x, Z=vectorizer.transform(rows.labels), method="pifa_lf_concat")
    model = XLinearModel.train(x, y, C=Indexer.gen(of_labels))
    return lambda text: model.predict(vectorizer.transform([text]), only_topk=K)


def train_fasttext(rows: Rows, folder: Path) -> Suggest:
    import fasttext

    file = folder / "train.txt"
    pairs = zip(rows.positives, rows.texts, strict=True)
    lines = (" ".join([*(f"__label__{label}" for label in own), text.lower()]) for own, text in pairs)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    threads = len(os.sched_getaffinity(0))
    model = fasttext.train_supervised(str(file), epoch=25, wordNgrams=2, loss="hs", thread=threads, verbose=0)
    return lambda text: model.f.predict(text.lower() + "\n", K, 0.0, "strict")  # its Python method needs NumPy 1


def train_annif(rows: Rows, folder: Path) -> Suggest:
    import annif.analyzer.analyzer
    from annif.corpus import DocumentFile, SubjectFileTSV
    from annif.registry import AnnifRegistry

    words = re.compile(r"\w+")
    annif.analyzer.analyzer.Analyzer.__init__ = lambda *_, **__: None
    annif.analyzer.analyzer.Analyzer.tokenize_words = lambda _, text, filter=True: words.findall(text.lower())
    project, subjects, points = (folder / name for name in ("projects.cfg", "subjects.tsv", "points.tsv"))
    settings = "cluster_balanced=False\ncluster_k=100\nmax_depth=3\nngram=2\n"
    head = f"[bonsai]\nname=bonsai\nlanguage=en\nvocab=own\nbackend=omikuji\nanalyzer=simple\nlimit={K}\n"
    project.write_text(head + settings, encoding="utf-8")
    uris = [f"<http://label/{place}>" for place in range(len(rows.labels))]
    named = (f"{uri}\t{text or uri}\n" for uri, text in zip(uris, rows.labels, strict=True))
    subjects.write_text("".join(named), encoding="utf-8")
    own = (" ".join(uris[label] for label in some) for some in rows.positives)
    pairs = (f"{text}\t{some}\n" for text, some in zip(rows.texts, own, strict=True))
    points.write_text("".join(pairs), encoding="utf-8")
    bonsai = AnnifRegistry(str(project), str(folder / "data"), False).get_project("bonsai")
    bonsai.vocab.load_vocabulary(SubjectFileTSV(str(subjects), "en"))
    bonsai.train(DocumentFile(str(points), bonsai.subjects))
    return lambda text: bonsai.suggest([text])


TOOLS = {
    "Omikuji's Bonsai": ("omikuji", train_bonsai),
    "PECOS XR-Linear": ("pecos", train_xr_linear),
    "fastText": ("fasttext", train_fasttext),
    "Annif (`omikuji`)": ("annif", train_annif),
}

if __name__ == "__main__":
    main()
