"""The card of an export, README.md: front matter for the Hub, and what files state or a command measured, nothing else.

It names no time and no place, so that two exports of one run are equal.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from schemas.manifest import Manifest
from scoring.decision import Decision

CARD = "README.md"
_SHOWN = ("P@1", "P@3", "P@5", "R@5", "R@10", "nDCG@5", "PSP@1", "PSP@5")
_USE = """
## Use

```python
import extremis

model = extremis.load(".")  # the folder of this file
print(model.predict(["a text"]))
```

```sh
extremis serve .
```
"""


def card(
    export: Manifest,
    rows: Mapping[str, int],
    decision: Decision,
    unseen: int,
    evaluation: Mapping[str, Any] | None,
    license: str | None = None,
    language: Sequence[str] = (),
) -> str:
    """Return the text of the card.

    `rows`: those of DATA by split. `unseen`: number of labels without training points. `evaluation`: the report of
    `evaluate` on the test split at the exported step. `license`, `language`: of the data, as they were stated.
    """
    scores = export.parameters["options"].get("scores", "classifier")
    measured = None if evaluation is None or evaluation["scores"] != scores else evaluation
    stated = {"license": license, "language": [*language] or None, "tags": ["extreme-classification"]}
    front = {"library_name": "extremis", "pipeline_tag": "text-classification", **stated}
    lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in front.items() if value), "---", ""]
    lines += [f"# A model of {export.rows:,} labels of texts", "", *_sources(export, rows)]
    lines += [f"- license of the data: {license or 'not stated'}; languages: {', '.join(language) or 'not stated'}"]
    lines += ["", "## Figures", "", *_figures(measured)]
    lines += ["", "## Decision and probabilities", "", *_decision(decision, export.parameters["calibration"])]
    lines += ["", "## What it does not know", "", *_unknown(export, unseen, measured)]
    return "\n".join([*lines, _USE])


def _sources(export: Manifest, rows: Mapping[str, int]) -> Iterator[str]:
    facts, parents = export.parameters, export.parents
    recipe, of = facts["recipe"], ", ".join(f"{count:,} rows of {split}" for split, count in rows.items())
    held_out = f"; {100 * share:.3g} % of train held out" if (share := float(recipe["data"]["holdout"])) else ""
    yield f"- data: {of}{held_out}; `{parents['data']}`"
    encoder = f"encoder `{recipe['encoder']['kind']}`, vectors of {facts['dimension']:,} dimensions"
    yield f"- recipe: method `{recipe['method']}`, {encoder}; each key is in `_manifest.json`"
    yield f"- checkpoint: step {facts['step']:,}; `{parents['checkpoint']}`"
    if "fusion" in parents:
        yield f"- fused scores: `{parents['fusion']}`"


def _figures(evaluation: Mapping[str, Any] | None) -> Iterator[str]:
    if evaluation is None:
        yield "Not evaluated on a test split before this export was made."
        return
    yield f"Of {evaluation['queries']:,} rows of test, with 95 % intervals, by exact search in the run:"
    yield from ("", "| % | | from | to |", "|---|---|---|---|")
    for name in _SHOWN:
        if name in evaluation["metrics"]:
            low, high = evaluation["intervals"][name]
            yield f"| {name} | {evaluation['metrics'][name]:.2f} | {low:.2f} | {high:.2f} |"


def _decision(decision: Decision, calibration: Mapping[str, Any] | None) -> Iterator[str]:
    yield f"Labels of a text, unless a call states others: {decision.name} (`decision.toml`)."
    if calibration is None:
        yield "They have scores, but no probabilities: there were no held-out rows to learn these from."
        return
    yield (
        f"Probabilities of the best labels of {calibration['queries']:,} rows of {calibration['split']}: expected "
        f"calibration error {100 * calibration['ece']:.2f} %, Brier score {calibration['brier']:.4f}."
    )


def _unknown(export: Manifest, unseen: int, evaluation: Mapping[str, Any] | None) -> Iterator[str]:
    yield f"- {unseen:,} of {export.rows:,} labels have no training point."
    for points, found in (evaluation or {}).get("labels_by_frequency", {}).items():
        if "R@5" in found:
            labels = f"{found['labels']:,} labels with {points} training point{'s' * (points != '1')}"
            yield f"- {labels}: {found['R@5']:.1f} % of {found['positives']:,} positives of test are among the best 5."
    calibration = export.parameters["calibration"]
    if calibration is not None:
        share = 100 * calibration["none_of_these"]["fragments"]
        yield (
            f"- Texts of another kind: if more than {share:.1f} % of the tokens are parts of words, scores and "
            "probabilities say nothing (`none_of_these`)."
        )
