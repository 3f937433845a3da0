"""`extremis report` as a user sees it: the file, and the page in a browser, over texts that try to break it."""

import csv
import io
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extremis.inspecting.inspect import sharding_command
from schemas.manifest import open_manifest
from tests.browser import WAIT_SECONDS, browser, console_messages, requests
from tests.command import Done, call, refused, sets
from tests.pipelines.raw import point, write_lines, write_tiny

HOSTILE = ("</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>", "{{ 7 * 7 }} &amp; \u2028 end")
CHOICES = sets("order.batch=16", "train.epochs=4", "refresh.every=1", "validation.split=test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with hostile texts, a run with tables and an evaluation, and one without either."""
    folder = tmp_path_factory.mktemp("report")
    raw = write_tiny(folder / "raw", rows=60, labels=20)
    labels = [{"uid": f"L{i}", "title": f"label {i} {HOSTILE[i % 3]}"} for i in range(20)]
    write_lines(raw / "lbl.json.gz", labels)
    points = [point(i, 20) for i in range(60)]
    for i, record in enumerate(points):
        record["content"] = f"zebra{i} {HOSTILE[i % 3]}"
    write_lines(raw / "trn.json.gz", points)
    options = ("--tokenizer", "train:300", "--row-group-rows", "8", "--propensity", "0.55,1.5", "--keep-text")
    assert call("shard", raw, folder / "data", *options).status == 0
    mined = (*CHOICES, "--set", "refresh.stale=wait")
    assert call("run", "astra", folder / "data", folder / "<b>run", *mined).status == 0
    assert call("evaluate", folder / "data", folder / "<b>run", "--baseline").status == 0
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
        wait_for_charts(driver)
        yield driver


def wait_for_charts(driver: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, WAIT_SECONDS).until(
        lambda page: page.execute_script("return document.documentElement.dataset.drawn")
    )


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
    assert {"chart-age", "chart-overlap", "chart-scores-0-queries", "chart-funnel-0-queries"} <= names
    assert {"chart-validation", "chart-time-to-P-1", "chart-metrics-test", "chart-deciles-test"} <= names
    assert console_messages(page) == []
    assert [url for url in requests(page) if not url.startswith("file://")] == []


BASELINES = ["linear ranker", "nearest label texts by TF-IDF", "nearest queries by TF-IDF", "popular labels"]


def test_what_a_run_found_odd_is_beside_its_metrics(page: Any) -> None:
    assert "alone, after epoch 1: P@1 <b>fell</b>" in page.find_element("id", "metrics").text


def test_baselines_stand_beside_the_runs(page: Any) -> None:
    rows = page.execute_script(
        "return [...document.querySelectorAll('[data-csv=metrics-test] tbody tr')].map(r => r.cells[0].textContent)"
    )
    assert rows[-4:] == BASELINES
    charts = page.execute_script("return JSON.parse(document.getElementById('body').textContent).charts.metrics")
    names = [trace["name"] for trace in charts[0]["figure"]["data"]]
    assert names[-4:] == BASELINES


def test_metrics_come_first_beside_baselines(page: Any) -> None:
    sections = page.execute_script("return [...document.querySelectorAll('main > section')].map(s => s.id)")
    assert sections == ["metrics", "queries", "training", "tables", "data", "made"]
    cards = page.execute_script(
        "return [...document.querySelectorAll('.card')].map(c => [c.querySelector('h3').textContent, "
        "[...c.querySelectorAll('.bar span')].map(s => s.textContent)])"
    )
    assert [title for title, _ in cards] == ["P@1", "P@5", "R@10", "PSP@5"]
    for _, names in cards:
        assert names == [
            "<b>run",
            "linear ranker",
            "nearest label texts by TF-IDF",
            "nearest queries by TF-IDF",
            "popular labels",
        ]


def test_terms_are_explained(page: Any) -> None:
    terms = page.execute_script("return [...document.querySelectorAll('abbr')].map(a => [a.textContent, a.title])")
    assert {"P@5", "PSP@3", "popular labels", "recall", "seen"} <= {name for name, _ in terms} | {"seen"}
    assert all(len(meaning) > 20 for _, meaning in terms)
    assert len(page.find_elements("css selector", "dl dt")) >= 20


def test_weakest_queries_and_labels_are_shown(page: Any, folder: Path) -> None:
    shown = {
        name: page.execute_script(
            "return [...document.querySelector(arguments[0]).querySelectorAll('tbody tr')].map("
            "r => [...r.cells].map(c => c.textContent))",
            f"[data-csv^='weakest-{name}']",
        )
        for name in ("queries", "labels")
    }
    assert shown["queries"]
    assert all(text and int(hits) < int(of) for text, hits, of in shown["queries"])
    assert shown["labels"]
    assert all(text.startswith("label ") and int(hits) < int(of) for text, hits, of in shown["labels"])
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
    assert [name.lstrip("\ufeff") for name in rows[0][:4]] == ["run", "step", "queries", "P@1"]
    assert rows[1][0] == "<b>run"
    assert 0 <= float(rows[1][3]) <= 100
    labels = list(csv.reader(io.StringIO(page.execute_async_script(script, "[data-csv^=weakest-labels]"), newline="")))
    assert {len(row) for row in labels} == {3}
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
    for chart in (chart for charts in sections.values() for chart in charts):
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


def test_texts_are_texts(page: Any) -> None:
    search(page)
    shown = page.execute_script("return document.getElementById('found').textContent")
    assert "<img src=x onerror=alert(2)>" in shown or "</script><script>alert(1)</script>" in shown
    assert page.execute_script("return document.querySelectorAll('#found img, #found script, #found b').length") == 0
    assert "<b>run" in page.execute_script("return document.querySelector('h1').textContent")


def test_runs_stand_side_by_side(page: Any) -> None:
    search(page, split="train")
    views = page.execute_script(
        "return [...document.querySelector('#found article').querySelectorAll('h4')].map(h => h.textContent)"
    )
    assert views == ["<b>run", "alone"]
    text = page.execute_script("return document.querySelector('main').textContent")
    assert "What differs in the recipes" in text
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
        wait_for_charts(driver)
        width = driver.execute_script("return document.documentElement.scrollWidth")
        assert width == 390
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
    refused(call("report", tmp_path / "other", folder / "alone"), "made from other data")


def test_evaluations_of_a_whole_split_are_kept(folder: Path) -> None:
    run = folder / "<b>run"
    kept = sorted(path.name for path in (run / "evaluations").iterdir())
    assert call("evaluate", folder / "data", run, "--limit", "5").status == 0
    assert call("evaluate", folder / "data", run, "--no-filter").status == 0
    assert sorted(path.name for path in (run / "evaluations").iterdir()) == kept
    assert kept == [f"test-{max((run / 'checkpoints').iterdir()).name}.json"]
