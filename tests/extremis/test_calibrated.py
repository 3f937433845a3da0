"""What an export does not know: probabilities, texts without a known word, and what a score comes from."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

import extremis
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.shard_files.parquet import list_column
from schemas.table import Table
from scoring.decision import Decision
from scoring.exported import Exported
from tests.command import ROOT, call, refused
from tests.scoring.test_decision import plainly
from trainer.evaluation.evaluate import open_split
from trainer.inputs import Inputs
from trainer.methods.sections import Data

TEXTS = ["a ship in a storm", "a view of the sea with trees", "portrait of a man", "a horse"]
BLANK = ["", " \t\n", "☃ ☃"]
# Sentences of other languages, and English of another field: none of them is about a work of art.
ELSEWHERE = {
    "German": [
        "Der Hund läuft über die Straße und bellt laut.",
        "Ich möchte gern ein Glas Wasser und ein Stück Brot.",
        "Die Katze schläft seit heute Morgen auf dem Sofa.",
        "Wie komme ich am schnellsten zum Bahnhof?",
        "Das Wetter wird morgen leider wieder schlechter.",
        "Unsere Firma verkauft Schrauben und Werkzeuge.",
        "Bitte senden Sie mir die Rechnung bis Freitag.",
        "Er hat gestern vergessen, den Schlüssel mitzunehmen.",
    ],
    "Swedish": [
        "Hunden springer över gatan och skäller högt.",
        "Jag vill gärna ha ett glas vatten och lite bröd.",
        "Katten har sovit i soffan sedan i morse.",
        "Hur kommer jag snabbast till stationen?",
        "Vädret blir tyvärr sämre igen i morgon.",
        "Vårt företag säljer skruvar och verktyg.",
    ],
    "Russian": ["Собака бежит через улицу.", "Где находится вокзал?", "Погода завтра будет хуже."],
}


@pytest.fixture(scope="module")
def model(exports: Path) -> extremis.Model:
    return extremis.load(exports, threads=1)


def facts(exports: Path) -> dict:
    return json.loads((exports / "one" / "calibration.json").read_text())


def test_evaluate_and_export_measure_the_same_probabilities(data: Path, exports: Path, tmp_path: Path) -> None:
    """Of the rows that the run held out with new texts, which no scorer of the fusion knows then."""
    run, stated = exports.parent / "run", facts(exports)
    held_out = call("evaluate", data, run, "--split", "holdout", "--calibrate", "--json").json["calibration"]
    assert (stated["split"], held_out["split"]) == ("holdout", "holdout")
    assert held_out["queries"] == stated["queries"] > 80
    for name in ("ece", "brier"):
        assert held_out[name] == pytest.approx(stated[name], abs=0.002)
        assert held_out[name] < held_out["uncalibrated"][name]
    done = call("evaluate", data, run, "--calibrate", "--json")
    of_test = done.json["calibration"]
    assert max(of_test["ece"], of_test["uncalibrated"]["ece"]) < 0.1  # trees give log odds
    assert f"ECE {100 * of_test['ece']:.2f} %" in done.err
    assert call("report", data, run, "--out", tmp_path / "page.html", "--queries", "0").status == 0
    page = (tmp_path / "page.html").read_text()
    assert "Probabilities on test" in page
    assert f"{of_test['brier']:.4f}" in page


def test_rows_to_calibrate_by_are_asked_for(data: Path, mined: Path, tmp_path: Path) -> None:
    refused(call("evaluate", data, mined, "--calibrate"), "A calibration is fitted on queries", "data.holdout=0.02")
    for more in ("--calibration-split", "val"), ("--precision", "0.5"):
        refused(call("export", data, mined, tmp_path / "out", *more), "A calibration is fitted on queries")
        assert not (tmp_path / "out").exists()


def test_probabilities_are_those_of_the_curve(model: extremis.Model, exports: Path, tmp_path: Path) -> None:
    calibration = facts(exports)
    curve = calibration["curve"]
    predictions = model.predict(TEXTS, max_labels=20)
    for prediction in predictions:
        scores = [label.score for label in prediction.labels]
        expected = np.interp(scores, curve["scores"], curve["probabilities"])
        np.testing.assert_allclose([label.probability for label in prediction.labels], expected, atol=1e-6)
        limits = calibration["none_of_these"]
        is_none = scores[0] < limits["score"] or share_of_fragments(exports, prediction.text) > limits["fragments"]
        assert prediction.none_of_these == is_none
    uncalibrated = extremis.load(exports / "two").predict(TEXTS)
    assert {(each.none_of_these, each.labels[0].probability) for each in uncalibrated} == {(None, None)}
    for precision, message in (
        (0.999, r"the highest precision that this model meets on its \d+ held-out texts, .* is 0\.\d+"),
        (1.5, "precision: expected a number less than or equal to 1, got 1.5"),
    ):
        with pytest.raises(InputError, match=message):
            model.predict(TEXTS, precision=precision)
    with pytest.raises(InputError, match="min_probability needs probabilities, but there is no calibration"):
        extremis.load(exports / "two").predict(TEXTS, min_probability=0.5)
    (tmp_path / "in.txt").write_text("\n".join([*TEXTS, ""]) + "\n")
    for name in ("p.jsonl", "p.parquet", "p.csv"):
        assert call("predict", exports, tmp_path / "in.txt", tmp_path / name, "--max-labels", "3").status == 0
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    for line, prediction in zip(lines, model.predict([*TEXTS, ""], max_labels=3), strict=True):
        assert line["labels"] == [label.key for label in prediction.labels]
        assert line["probabilities"] == pytest.approx([label.probability for label in prediction.labels], rel=1e-5)
        assert line["known_tokens"] == prediction.known_tokens
    table = pq.read_table(tmp_path / "p.parquet")
    assert table["known_tokens"].to_pylist() == [line["known_tokens"] for line in lines]
    np.testing.assert_allclose(table["probabilities"][0].as_py(), lines[0]["probabilities"], rtol=1e-6)
    head, first, *_ = (tmp_path / "p.csv").read_text().splitlines()
    assert head == "key,rank,label,text,score,probability,decision,none_of_these"
    assert float(first.rsplit(",", 3)[1]) == pytest.approx(lines[0]["probabilities"][0], rel=1e-6)


def share_of_fragments(exports: Path, text: str) -> float:
    """The share of a text's tokens that are unknown, continue a word or are the single first letter of a split word."""
    tokens = Tokenizer.from_file(str(exports / "one" / "encoder" / "tokenizer.json")).encode(text).tokens
    pairs = itertools.pairwise([*tokens, ""])
    parts = [t == "[UNK]" or t.startswith("##") or (len(t) == 1 and after.startswith("##")) for t, after in pairs]
    return sum(parts) / max(1, len(tokens))


def test_texts_of_another_language_or_field_are_none_of_these(model: extremis.Model, exports: Path) -> None:
    """Also where their scores are as high as those of correct labels; a stated precision gives them no label."""
    limits = facts(exports)["none_of_these"]
    pages = (line for page in sorted((ROOT / "docs").glob("*.md")) for line in page.read_text().splitlines())
    field = [line.replace("`", "") for line in pages if len(line.split()) > 12 and line[0].isalpha()]
    texts = [*itertools.chain.from_iterable(ELSEWHERE.values())]
    for prediction in model.predict(texts, max_labels=1):
        assert share_of_fragments(exports, prediction.text) > limits["fragments"], prediction.text
        assert prediction.none_of_these
    assert np.mean([prediction.none_of_these for prediction in model.predict(field, max_labels=1)]) > 0.95
    for precision in (0.3, 0.5):
        assert not any(prediction.labels for prediction in model.predict(texts, precision=precision))
        labelled = [bool(prediction.labels) for prediction in model.predict(field, precision=precision)]
        assert np.mean(labelled) < 0.05


def test_held_out_texts_are_familiar(data: Path, exports: Path) -> None:
    """All but one in a hundred, and no label is lost for the others."""
    exported = Exported.open(str(exports))
    table, share = open_split(DataLayout(str(data)), "holdout", Data(holdout=0.2))
    columns = exported.serving.columns
    rows = [Inputs.of(rows) for rows in share.batches(table, columns)]
    limited = Decision(min_probability=0.3)
    answers = [exported.decide(each, limited) for each in rows]
    unfamiliar = np.concatenate([answer.unfamiliar for answer in answers])
    assert unfamiliar.mean() <= 0.011
    for inputs, answer in zip(rows, answers, strict=True):
        every = exported.decide(inputs, Decision(max_labels=exported.table.rows))
        wanted = (every.probabilities >= 0.3) & ~answer.unfamiliar[:, None]
        np.testing.assert_array_equal(wanted.sum(1), (answer.ids != -1).sum(1))


def test_a_text_without_a_known_token_gets_the_prior(data: Path, model: extremis.Model) -> None:
    labels, train = (
        Table.open(DataLayout(str(data)).labels, "labels"),
        Table.open(DataLayout(str(data)).queries("train")),
    )
    frequency = np.concatenate([group["frequency"].to_numpy() for group in labels.batches(["frequency"])])
    order = np.argsort(-frequency, kind="stable")
    odds = np.log((frequency + 0.5) / (train.rows - frequency + 0.5))
    whole = model.predict([*BLANK, *TEXTS], max_labels=4)
    for prediction in whole[: len(BLANK)]:
        assert prediction.known_tokens == 0
        assert [label.key for label in prediction.labels] == [model.labels[place].key for place in order[:4].tolist()]
        np.testing.assert_allclose([label.score for label in prediction.labels], odds[order[:4]], rtol=1e-5)
        shares = [label.probability for label in prediction.labels]
        np.testing.assert_allclose(shares, (frequency[order[:4]] + 0.5) / (train.rows + 1), rtol=1e-5)
    for one, other in zip(whole[len(BLANK) :], model.predict(TEXTS, max_labels=4), strict=True):
        assert [label.key for label in one.labels] == [label.key for label in other.labels]
        np.testing.assert_allclose([label.score for label in one.labels], [label.score for label in other.labels], 1e-5)
    assert all(each.known_tokens > 0 for each in whole[len(BLANK) :])
    most, second = (model.labels[place].key for place in order[:2].tolist())
    assert model.predict("", max_labels=1, never=[most])[0].labels[0].key == second
    assert model.explain("", most).parts == {"prior": pytest.approx(odds[order[0]])}


def test_labels_are_left_out_of_each_text_or_of_all(model: extremis.Model, exports: Path, tmp_path: Path) -> None:
    best = [[label.key for label in each.labels] for each in model.predict(TEXTS, max_labels=6)]
    each = model.predict(TEXTS, max_labels=5, never=[keys[:1] for keys in best])
    assert [[label.key for label in prediction.labels] for prediction in each] == [keys[1:] for keys in best]
    most = [label.key for label in model.predict("", max_labels=5)[0].labels]
    texts, keys, many = [*TEXTS, ""], [*best[0], *most], len(model.labels)
    alone = model.predict(texts, max_labels=5, never=[keys] * len(texts))
    for of_all in (keys, {*keys}, np.array(keys), iter(keys)):
        assert repr(model.predict(texts, max_labels=5, never=of_all)) == repr(alone)
    whole = model.predict(texts, max_labels=2 * many, never=model.labels.keys[1:])
    assert {label.key for prediction in whole for label in prediction.labels} <= {model.labels[0].key}
    assert [len(each.labels) for each in model.predict(TEXTS, max_labels=2 * many)] == [many] * len(TEXTS)
    for wrong, message in (
        ("167", "never: expected a list of label keys, got str: '167'"),
        (5, "never: expected a list of label keys, got int"),
        ([*keys, "none such", ""], "never: unknown label key 'none such' and 1 others of"),
        ([["none such"]] * 4, "never: unknown label key 'none such'"),
        ([[["a"]]] * 4, "unknown label key"),
        ([5] * 4, r"never\[0\]: expected a list of label keys, got int: 5"),
        ([[]], "a list of keys for each of the 4 texts, got 1 items"),
    ):
        with pytest.raises(InputError, match=message):
            model.predict(TEXTS, never=wrong)
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n")
    (tmp_path / "keys").write_text("\n".join(keys) + "\n")
    never = "--max-labels", "5", "--never", f"@{tmp_path / 'keys'}"
    assert call("predict", exports, tmp_path / "in.txt", tmp_path / "p.jsonl", *never).status == 0
    lines = [json.loads(line)["labels"] for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert lines == [[label.key for label in prediction.labels] for prediction in alone]
    refused(call("predict", exports, "-", "-", "--never", "@nowhere"), "--never: expected @ and a file of keys")


@pytest.mark.parametrize("depth", [1, 10])
def test_labels_are_those_that_the_rule_gives_out_of_a_ranking_of_all_labels(
    exports: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However deep the ranking begins, and with other sets of labels for each text."""
    monkeypatch.setattr("scoring.exported.DEPTH", depth)
    draw, most = np.random.default_rng(depth), facts(exports)["none_of_these"]["fragments"]
    for name in ("one", "two"):
        model = extremis.load(exports / name, threads=1)
        keys, texts = model.labels.keys, [*TEXTS, *BLANK, "an oil painting of a river with boats and trees"]
        shares = (0.02, 0.2) if name == "one" else ()
        whole = model.predict(texts, max_labels=len(keys))
        for number in range(4):
            some = draw.permutation(keys).tolist()
            at_least = number % 3
            stated: dict[str, Any] = {"at_least": at_least, "groups": [some[:3], some[2:5], some[5:30]]}
            stated |= {"min_probability": shares[number % 2]} if shares else {}
            stated |= {"max_labels": 30} if number > 1 or not shares else {}
            allowed = [draw.permutation(keys)[: 40 * (n % 3)].tolist() for n in range(len(texts))]
            never = [some[n : n + 20] for n in range(len(texts))]
            sets: dict[str, Any] = {"allowed": allowed, "never": never} if number % 2 else {"never": some[:9]}
            found = model.predict(texts, **stated, **sets)
            for place, (prediction, every) in enumerate(zip(found, whole, strict=True)):
                own = {key: value[place] for key, value in sets.items()} if number % 2 else sets
                rule = Decision(**{**stated, "groups": tuple(map(tuple, stated["groups"]))}, never=tuple(own["never"]))
                rule = rule.model_copy(update={"allowed": tuple(own["allowed"]) if "allowed" in own else None})
                is_strange = bool(shares) and share_of_fragments(exports, prediction.text) > most
                ranking = [(label.key, 0.0 if is_strange else label.probability or 0.0) for label in every.labels]
                limit = stated.get("min_probability")
                assert [label.key for label in prediction.labels] == plainly(rule, ranking, limit), (name, stated, own)


def test_what_a_score_comes_from_adds_up_to_it(data: Path, model: extremis.Model, exports: Path) -> None:
    train = pa.concat_tables(Table.open(DataLayout(str(data)).queries("train")).batches(["key", "label_ids"]))
    labels_of = dict(zip(train["key"].to_pylist(), train["label_ids"].to_pylist(), strict=True))
    assert len(list_column(train, "label_ids").counts) == len(labels_of)
    seen = set()
    for prediction in model.predict(TEXTS, max_labels=5):
        for label in prediction.labels:
            explained, (place,) = model.explain(prediction.text, label.key), model.labels.ids([label.key])
            assert explained.score == pytest.approx(label.score, abs=1e-4)
            assert explained == model.explain(prediction.text, place)
            assert sum(explained.parts.values()) == pytest.approx(explained.score)
            # Trees may also lower a label that no point and no word speaks for.
            points, of_words = (sum(of[-1] for of in listed) for listed in (explained.points, explained.words))
            assert not explained.points or points == pytest.approx(explained.parts["points"], abs=1e-4)
            assert not explained.words or of_words == pytest.approx(explained.parts["words"], rel=1e-3)
            assert all(place in labels_of[key] for key, *_ in explained.points)
            seen |= {name for name, part in explained.parts.items() if part}
    assert {"vector", "points"} <= seen
    plain = extremis.load(exports / "two")
    label = plain.predict(TEXTS[0], max_labels=1)[0].labels[0]
    assert plain.explain(TEXTS[0], label.key).parts == {"vector": pytest.approx(label.score, abs=1e-5)}
    with pytest.raises(InputError, match="label: expected a whole number, 0 or more"):
        model.explain("a ship", -1)


def test_embeddings_have_the_width_of_the_vectors_and_end_in_the_bias(model: extremis.Model) -> None:
    x, none = model.embed(TEXTS), model.embed([])
    assert x.shape[1:] == none.shape[1:] == model._exported.serving.vectors.shape[1:]
    assert (x[:, -1] == 1).all() == model._exported.serving.bias


def test_no_labels_are_refused(model: extremis.Model, exports: Path) -> None:
    for k in (0, -1):
        with pytest.raises(InputError, match=f"max_labels: expected a whole number, 1 or more, got {k}"):
            model.predict("a ship", max_labels=k)
    refused(call("predict", exports, "-", "-", "--max-labels", "0"), "--max-labels")
