"""`extremis report` as a user sees it: the file, and the page in a browser, over texts that try to break it."""

import csv
import io
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from extremis.inspecting import sharding_command
from schemas.manifest import open_manifest
from schemas.storage import write_json
from tests.browser import WAIT_SECONDS, browser, console_messages, requests
from tests.command import Done, call, refused, sets
from tests.pipelines.raw import point, write_lines, write_tiny
from tests.report_page import Page

HOSTILE = ("</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>", "{{ 7 * 7 }} &amp; \u2028 end")
CHOICES = sets("order.batch=16", "train.epochs=4", "refresh.every=1", "validation.split=test", "data.holdout=0.2")
TRIALS = [
    {"recipe": "renee", "changes": ["a.b=<b>"], "P@1": 9.5, "P@5": 2.25, "nDCG@5": 3.0},
    {"recipe": "astra", "changes": [], "P@1": 40.0, "P@5": 20.0, "nDCG@5": 30.0, "ended": True},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with hostile texts, a run with tables and an evaluation, and one without either."""
    folder = tmp_path_factory.mktemp("report")
    raw = write_tiny(folder / "raw", rows=60, labels=20)
    labels = [{"uid": f"L{i}", "title": f"label {i % 18} {HOSTILE[i % 3]}"} for i in range(20)]
    write_lines(raw / "lbl.json.gz", labels)
    points = [point(i, 20) for i in range(60)]
    for i, record in enumerate(points):
        record["content"] = f"zebra{i} {HOSTILE[i % 3]}"
    write_lines(raw / "trn.json.gz", points)
    options = ("--tokenizer", "train:300", "--row-group-rows", "8", "--propensity", "0.55,1.5", "--keep-text")
    assert call("shard", raw, folder / "data", *options).status == 0
    mined = (*CHOICES, "--set", "refresh.stale=wait")
    assert call("run", "astra", folder / "data", folder / "<b>run", *mined).status == 0
    assert call("fuse", folder / "data", folder / "<b>run").status == 0
    assert call("evaluate", folder / "data", folder / "<b>run", "--baseline").status == 0
    first, second = ({"recipe": name, "changes": ["a.b=<b>"]} for name in ("renee", "decoupled"))
    auto = {
        "chosen": "decoupled",
        "changes": ["a.b=<b>"],
        "finalists": [first, second],
        "compared": "P <b>",
        "trials": TRIALS,
    }
    write_json(str(folder / "<b>run" / "auto.json"), auto)
    alone = sets("order.batch=16", "train.epochs=2", "negatives.hard=0")
    assert call("train", "random", folder / "data", folder / "alone", *alone).status == 0
    records = folder / "alone" / "metrics.jsonl"
    last = json.loads(records.read_text().splitlines()[-1])
    with records.open("a") as file:
        file.write(json.dumps({**last, "kind": "odd", "epoch": 1, "line": "P@1 <b>fell</b>"}) + "\n")
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> Done:
    runs = folder / "<b>run", folder / "alone"
    return call("report", folder / "data", *runs, "--out", folder / "page.html", "--queries", "40", "--json")


@pytest.fixture(scope="module")
def page(folder: Path, report: Done) -> Iterator[Any]:
    assert report.status == 0, report.err
    with browser() as driver:
        driver.get(f"file://{folder / 'page.html'}")
        assert driver.execute_script(
            "return document.documentElement.dataset.drawn"
        )  # whoever waits for a page has them
        yield driver


def search(driver: Any, words: str = "", kind: str = "all", split: str = "") -> int:
    """Return the number of queries that match."""
    script = """
        const [words, kind, split] = arguments;
        document.getElementById("words").value = words;
        document.getElementById("kind").value = kind;
        document.getElementById("split").value = split;
        document.getElementById("search").dispatchEvent(new Event("input"));
        return document.getElementById("count").textContent;
    """
    return int(driver.execute_script(script, words, kind, split).split(" ")[0])


def test_the_file_is_one_page_that_names_no_address(folder: Path, report: Done) -> None:
    assert report.status == 0, report.err
    text = (folder / "page.html").read_text()
    assert report.json["bytes"] == len(text.encode()) < 5_000_000
    assert report.json["out"] == str(folder / "page.html")
    for attribute in ('src="', "@import", "<link", "http://", 'href="http'):
        assert attribute not in text
    for hostile in HOSTILE[:2]:
        assert hostile not in text
    again = call(
        "report",
        folder / "data",
        folder / "<b>run",
        folder / "alone",
        "--out",
        folder / "2.html",
        "--queries",
        "40",
    )
    assert again.status == 0
    assert (folder / "2.html").read_bytes() == (folder / "page.html").read_bytes()


def test_it_renders_without_a_complaint_and_without_the_network(page: Any) -> None:
    charts = page.execute_script(
        "return [...document.querySelectorAll('.plot')].map(p => [p.id, p.querySelectorAll('.main-svg').length])"
    )
    assert len(charts) >= 15
    assert all(drawn for _, drawn in charts), charts
    names = {name for name, _ in charts}
    assert {"chart-tail", "chart-loss", "chart-rates", "chart-throughput", "chart-time-0", "chart-recall"} <= names
    assert {"chart-age", "chart-scores-0-queries", "chart-funnel-0-queries"} <= names
    assert {"chart-validation", "chart-time-to-P-1"} <= names
    said = "Negatives that were also in the previous table: "
    assert any(p.text.startswith(said) for p in page.find_elements("css selector", ".said"))  # of one table
    assert console_messages(page) == []
    assert [url for url in requests(page) if not url.startswith("file://")] == []


BASELINES = ["labels' names in queries", "linear ranker", "nearest queries by TF-IDF", "popular labels"]


def cells(page: Any, table: str) -> list[list[str]]:
    """Return the cells of a table's rows."""
    script = """return [...document.querySelector(arguments[0]).querySelectorAll('tbody tr')].map(
        r => [...r.cells].map(c => c.textContent))"""
    rows: list[list[str]] = page.execute_script(script, f"[data-csv^='{table}']")
    return rows


def test_what_stands_for_a_run_comes_first(page: Any, folder: Path) -> None:
    (step,) = (int(path.name.removeprefix("step-")) for path in (folder / "<b>run" / "fusion").iterdir())
    first, second = (p.text for p in page.find_elements("css selector", ".representative"))
    assert f"Step {step} with fused scores represents {folder.name}/<b>run (astra): vectors + " in first
    assert f"with classifier scores represents {folder.name}/alone (random)." in second
    facts = json.loads((folder / f"<b>run/fusion/step-{step:08d}/_manifest.json").read_text())["parameters"]
    fitted = {title.split(" alone")[0]: [float(value) for value in values] for title, *values in cells(page, "scores-")}
    assert fitted == {name: [metrics["P@1"], metrics["P@5"]] for name, metrics in facts["metrics"].items()}
    assert f"{facts['queries']} queries of holdout" in page.find_element("id", "metrics").text
    shown = [[each["recipe"], ", ".join(each["changes"])] for each in TRIALS]
    assert [row[:2] for row in cells(page, "trials-")] == shown
    assert [row[2:] for row in cells(page, "trials-")] == [
        ["9.50", "2.25", "3.00", "chosen"],
        ["40.00", "20.00", "30.00", "ended"],
    ]
    assert "auto chose renee with a.b=<b>" in page.find_element("id", "made").text
    assert "decoupled with a.b=<b> had P <b>: the final run." in page.find_element("id", "made").text


def test_all_tables_have_the_same_k(page: Any) -> None:
    names = page.execute_script("return [...document.querySelectorAll('main th, .card h3')].map(h => h.textContent)")
    assert {name.partition("@")[2] for name in names if "@" in name} == {"1", "5"}


def test_what_a_run_found_odd_is_beside_its_metrics(page: Any, folder: Path) -> None:
    assert f"{folder.name}/alone (random), after epoch 1: P@1 <b>fell</b>" in page.find_element("id", "metrics").text


def test_baselines_stand_beside_the_runs(page: Any) -> None:
    assert [row[0] for row in cells(page, "metrics-test")][-4:] == BASELINES


def test_metrics_come_first_beside_baselines(page: Any, folder: Path) -> None:
    sections = page.execute_script("return [...document.querySelectorAll('main > section')].map(s => s.id)")
    assert sections == ["metrics", "queries", "labels", "every-label", "training", "tables", "data", "made"]
    cards = page.execute_script(
        "return [...document.querySelectorAll('.card')].map(c => [c.querySelector('h3').textContent, "
        "[...c.querySelectorAll('.bar span')].map(s => s.textContent)])"
    )
    assert [title for title, _ in cards] == ["P@1", "P@5", "R@5", "PSP@5"]
    for _, names in cards:
        assert names == [f"{folder.name}/<b>run (astra)", *BASELINES]


def test_tables_of_negatives_are_counted_from_their_files(page: Any, folder: Path) -> None:
    shown = Page((folder / "page.html").read_text()).table(f"tables-{folder.name}/<b>run (astra)")
    before: dict[str, np.ndarray] = {}
    assert len(shown) >= 2
    for row in shown[::-1] if int(shown[0]["made for epoch"]) > int(shown[-1]["made for epoch"]) else shown:
        source = row["rows of"]
        place = folder / "<b>run" / "negatives" / f"epoch-{int(row['made for epoch']):04d}" / source
        files = [pq.read_table(path) for path in sorted(place.glob("part-*"))]
        ids = np.array(pa.concat_tables(files)["label_ids"].to_pylist())
        assert (int(row["rows"]), int(row["K"])) == ids.shape
        assert int(row["padded rows"]) == (ids < 0).any(axis=1).sum()
        if source in before:
            old, sizes = before[source], (ids >= 0).sum(axis=1)
            same = [len({*new} & {*was} - {-1}) for new, was in zip(ids.tolist(), old.tolist(), strict=True)]
            expected = np.mean([n / size for n, size in zip(same, sizes.tolist(), strict=True) if size])
            assert float(row["overlap"]) == pytest.approx(expected, abs=1e-4)
        before[source] = ids


def test_terms_are_explained(page: Any) -> None:
    terms = page.execute_script("return [...document.querySelectorAll('abbr')].map(a => [a.textContent, a.title])")
    assert {"P@5", "PSP@5", "popular labels", "recall", "seen"} <= {name for name, _ in terms} | {"seen"}
    assert all(len(meaning) > 20 for _, meaning in terms)
    assert len(page.find_elements("css selector", "dl dt")) >= 20


def test_weakest_queries_are_shown(page: Any) -> None:
    queries = cells(page, "weakest-queries")
    assert queries
    assert all(text and keys.startswith("p") and int(hits) < int(of) for text, keys, hits, of in queries)
    assert search(page, kind="weak") >= 1


def test_queries_of_test_come_first(page: Any) -> None:
    search(page)
    assert page.execute_script("return document.querySelector('#found header span').textContent") == "test"


def test_tables_are_downloaded_as_csv(page: Any) -> None:
    script = """
        const done = arguments[arguments.length - 1];
        URL.createObjectURL = (blob) => { blob.text().then(done); return "#"; };
        document.querySelector(arguments[0]).nextElementSibling.click();
    """
    rows = list(csv.reader(io.StringIO(page.execute_async_script(script, "[data-csv=metrics-test]"), newline="")))
    shown = page.execute_script("return [...document.querySelectorAll('[data-csv=metrics-test] tr')].length")
    assert len(rows) == shown
    assert [name.lstrip("\ufeff") for name in rows[0][:4]] == ["run", "scores", "step", "queries"]
    assert rows[1][0].endswith("/<b>run (astra)")
    assert 0 <= float(rows[1][4]) <= 100
    assert console_messages(page) == []


def test_it_names_the_commands_that_made_the_data_and_the_run(page: Any, folder: Path) -> None:
    lines = page.execute_script("return [...document.querySelectorAll('pre')].map(p => p.textContent)")
    assert len(lines) == 3
    assert lines[0] == sharding_command(str(folder / "data"), open_manifest(str(folder / "data")))
    first = lines[1].splitlines()
    assert shlex.split(first[0])[:4] == ["extremis", "run", "astra", str(folder / "data")]
    assert shlex.split(first[1]) == ["extremis", "evaluate", str(folder / "data"), f"{folder}/<b>run", "--baseline"]


def test_charts_are_valid_figures_of_plotly(page: Any) -> None:
    from plotly.graph_objects import Figure

    sections = page.execute_script("return JSON.parse(document.getElementById('body').textContent).charts")
    for chart in (chart for charts in sections.values() for chart in charts if "figure" in chart):
        Figure(chart["figure"])  # raises ValueError for an unknown attribute or a wrong value


def test_charts_answer_to_the_mouse(page: Any) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    plot = page.find_element(By.ID, "chart-epoch-loss")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(page).move_to_element(plot).perform()
    WebDriverWait(page, WAIT_SECONDS).until(lambda _: plot.find_elements(By.CSS_SELECTOR, ".hoverlayer text"))


def test_it_searches_text_labels_and_keys(page: Any) -> None:
    assert search(page) == 40
    assert search(page, split="train") == 20
    assert search(page, "zebra0") + search(page, "zebra1") >= 1
    assert search(page, "label 3") >= 1
    key = page.execute_script("return document.querySelector('#found header').children[1].textContent")
    assert search(page, key) >= 1
    assert search(page, "nowhere to be found") == 0
    marked, shown = search(page, kind="suspect"), page.find_elements("css selector", "li.suspect")
    assert (marked > 0) == bool(shown)
    assert search(page, kind="miss") + search(page, kind="differ") >= 1
    assert console_messages(page) == []


def test_labels_are_searched_and_stand_beside_what_they_are_confused_with(page: Any) -> None:
    script = """
        const [words] = arguments;
        document.getElementById("label-words").value = words;
        document.getElementById("label-search").dispatchEvent(new Event("input"));
        const lists = (view) => Object.fromEntries([...view.querySelectorAll(".lists > div")].map(d => [
            d.querySelector("h5").textContent, [...d.querySelectorAll("li")].map(l => [l.className, l.innerText])]));
        return [...document.querySelectorAll("#label-found article")].map(a => [
            a.querySelector("header span").textContent, [...a.querySelectorAll(".views > div")].map(lists)]);
    """
    body = page.execute_script("return JSON.parse(document.getElementById('body').textContent)")
    for label, (text, key, points, shared) in body["labels"].items():
        found = dict(page.execute_script(script, f"{key} {text.split()[1]}"))
        assert key in found
        assert shared == (key in {"L0", "L1", "L18", "L19"})
        for number, view in enumerate(found[key]):
            own = [query for query in body["queries"] if int(label) in query["positives"]]
            first = [[each[0] for each in query["runs"][number]["predictions"][:5]] for query in own]
            listed = next((rows for title, rows in view.items() if title.startswith("its queries")), [])
            assert len(listed) == min(10, len(own))
            assert [mark == "hit" for mark, _ in listed] == [int(label) in top for top in first][:10]
            near = body["near"][number].get(label, [])
            assert len(view.get("nearest labels", [])) == len(near)
            assert int(label) not in dict(near)
            missed = [(query, top) for query, top in zip(own, first, strict=True) if int(label) not in top]
            wrong = sum(each not in query["positives"] for query, top in missed for each in top)
            counts = [int(text.split("× ")[1]) for _, text in view.get("predicted instead", [])]
            assert counts == sorted(counts, reverse=True)
            assert sum(counts) == wrong or len(counts) == 10
        assert points >= 0
    assert page.execute_script(script, "nowhere to be found") == []
    assert console_messages(page) == []


def test_every_label_is_sorted_searched_and_opened(page: Any, folder: Path) -> None:
    """What the table shows is the table in the run."""
    kept = pq.read_table(max((folder / "<b>run" / "evaluations").glob("*-labels.parquet"))).to_pylist()
    rows = {row["label"]: row for row in kept if row["support"] or row["predicted"]}
    cells = "return [...document.querySelectorAll('#every tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    assert len(page.execute_script(cells)) == len(rows)
    for name, column in (("F1", 1), ("positives", 4), ("median rank", 7)):
        click = "[...document.querySelectorAll('#every .sorter')].find(b => b.textContent === arguments[0]).click()"
        for order in ("ascending", "descending"):
            page.execute_script(click, name)
            assert page.execute_script(f"return document.querySelectorAll('#every th')[{column}].ariaSort") == order
            shown = [line[column] for line in page.execute_script(cells)]
            numbers = [float(value.replace("> ", "1e9")) for value in shown if value]
            assert numbers == sorted(numbers, reverse=order == "descending")
            assert "" not in shown[: len(numbers)]  # labels without the figure come last
    assert find_labels(page, kind="lost") == sum(row["support"] > 0 == row["found"] for row in rows.values())
    assert find_labels(page, kind="silent") == sum(row["predicted"] == 0 for row in rows.values())
    assert find_labels(page, words="no such label") == 0
    assert page.execute_script("return document.querySelector('#every tbody').textContent") == "No label matches."
    row = max(rows.values(), key=lambda row: len(row["missed_for"]))
    assert find_labels(page, words=row["label"]) >= 1
    page.execute_script("document.querySelector('#every .opener').click()")
    details = page.execute_script("return document.querySelector('#every .details').textContent")
    assert f"{row['support'] - row['found']} of {row['support']} queries" in details
    assert row["missed_query"] + ": " + row["missed_query_text"] in details
    assert find_labels(page) == len(rows)
    assert console_messages(page) == []


def find_labels(page: Any, words: str = "", kind: str = "all") -> int:
    """Search the table of labels, and return the number that it finds."""
    page.execute_script(
        "document.getElementById('every-words').value = arguments[0]; document.getElementById('every-kind').value = "
        "arguments[1]; document.getElementById('every-words').dispatchEvent(new Event('input', {bubbles: true}));",
        words,
        kind,
    )
    return int(page.execute_script("return document.getElementById('every-count').textContent").split(" of ")[0])


def test_texts_are_texts(page: Any) -> None:
    search(page)
    shown = page.execute_script("return document.getElementById('found').textContent")
    assert "<img src=x onerror=alert(2)>" in shown or "</script><script>alert(1)</script>" in shown
    assert page.execute_script("return document.querySelectorAll('#found img, #found script, #found b').length") == 0
    assert "<b>run" in page.execute_script("return document.querySelector('h1').textContent")


def test_runs_stand_side_by_side(page: Any, folder: Path) -> None:
    search(page, split="train")
    views = page.execute_script(
        "return [...document.querySelector('#found article').querySelectorAll('h4')].map(h => h.textContent)"
    )
    assert views == [f"{folder.name}/<b>run (astra)", f"{folder.name}/alone (random)"]
    text = page.execute_script("return document.querySelector('main').textContent")
    assert "Differences between the recipes" in text
    assert "train.epochs" in text
    assert "has not been evaluated" in text  # the run alone


def test_the_theme_changes_on_the_button(page: Any) -> None:
    before = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    page.execute_script("document.getElementById('theme').click()")
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") != before
    page.execute_script("document.getElementById('theme').click()")
    assert console_messages(page) == []


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_on_a_phone_nothing_is_wider_than_the_screen(folder: Path, report: Done, dark: bool) -> None:
    assert report.status == 0, report.err
    with browser(390, 844, dark) as driver:
        driver.get(f"file://{folder / 'page.html'}")
        width = driver.execute_script("return document.documentElement.scrollWidth")
        assert width == 390
        tables = driver.execute_script(
            "return [...document.querySelectorAll('.scroll')].filter(s => s.checkVisibility()).map("
            "s => [s.scrollWidth > s.clientWidth + 1, s.className])"
        )
        assert all(is_wide == ("wide" in marks) for is_wide, marks in tables)
        assert {is_wide for is_wide, _ in tables} == {True, False}
        ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (not dark)
        assert console_messages(driver) == []


def test_a_run_alone_has_a_page_without_queries(folder: Path) -> None:
    done = call("report", folder / "alone", "--json")
    assert done.status == 0, done.err
    assert done.json["out"] == str(folder / "alone" / "report.html")
    assert "give DATA before the runs" in (folder / "alone" / "report.html").read_text()
    (folder / "alone" / "report.html").unlink()


def test_wrong_use_is_refused(folder: Path, tmp_path: Path) -> None:
    refused(call("report", folder / "data"), "Name the runs")
    refused(call("report", folder / "data", folder / "alone", folder / "alone"), "named twice")
    refused(call("report", folder / "data", tmp_path / "nothing"), "no run here")
    assert call("shard", write_tiny(tmp_path / "raw"), tmp_path / "other", "--tokenizer", "train:300").status == 0
    refused(call("report", tmp_path / "other", folder / "alone"), "trained on different data")


def test_evaluations_of_a_whole_split_are_kept(folder: Path) -> None:
    run = folder / "<b>run"
    kept = sorted(path.name for path in (run / "evaluations").iterdir())
    assert call("evaluate", folder / "data", run, "--limit", "5").status == 0
    assert call("evaluate", folder / "data", run, "--no-filter").status == 0
    assert sorted(path.name for path in (run / "evaluations").iterdir()) == kept
    step = max((run / "fusion").iterdir()).name
    assert kept == [f"test-{step}-labels.parquet", f"test-{step}.json"]
