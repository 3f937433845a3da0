"""examples/serve.py as a user starts it: a process at a port, asked, switched, stopped, and given nonsense."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import extremis
from scoring.export_versions import make_current
from tests.browser import browser, console_messages, requests
from tests.command import ROOT, environment

pytest.importorskip("fastapi_offline", reason="the service needs the extra `http`")
PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
TEXTS = ["a ship in a storm", "a view of the sea", "", "portrait of a man with a horse", "☃", "trees by a river"]


class Service:
    """A service that runs."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self.log = process, log
        started = self.wait_for(r"serving \S+ at http://127\.0\.0\.1:(\d+)")
        self.port = int(started[1])

    def wait_for(self, pattern: str) -> re.Match[str]:
        return self.wait_until(lambda: re.search(pattern, self.log.read_text()))

    def wait_until(self, condition: Callable[[], Any]) -> Any:
        """Wait until `condition()` is true; return what it is."""
        for _ in range(1200):
            if found := condition():
                return found
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def ask(self, body: Any = None, path: str = "/predict") -> tuple[int, Any]:
        """Return the status and the body of an answer; `body` is bytes, or an object to be sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request("GET" if sent is None else "POST", path, sent)
            answer = connection.getresponse()
            content = answer.read()
            assert b"Traceback" not in content
            return answer.status, json.loads(content) if path != "/metrics" else content.decode()


@contextlib.contextmanager
def serving(place: Path, log: Path, *options: str) -> Iterator[Service]:
    words = [sys.executable, str(ROOT / "examples" / "serve.py"), str(place), "--port", "0", "--poll", "0.1", *options]
    with log.open("w") as out:
        process = subprocess.Popen(words, stderr=out, stdout=out, text=True, env=environment(PATH))
    try:
        yield Service(process, log)
    finally:
        process.terminate()
        status = process.wait(60)
        assert status == 0, (status, log.read_text())
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture
def folder(exports: Path, tmp_path: Path) -> Path:
    """A folder of exports of one's own."""
    return Path(shutil.copytree(exports, tmp_path / "exports"))


def expected(model: extremis.Model, question: dict[str, Any]) -> list[Any]:
    found = model.predict(question["texts"], k=question["k"], filter=question.get("filter", ()))
    return [
        [each.known_tokens, each.none_of_these, [(label.key, label.text, label.probability) for label in each.labels]]
        for each in found
    ]


def answered(answer: dict[str, Any]) -> list[Any]:
    return [
        [
            each["known_tokens"],
            each["none_of_these"],
            [(label["key"], label["text"], label["probability"]) for label in each["labels"]],
        ]
        for each in answer["predictions"]
    ]


def test_requests_that_are_answered_together_get_what_each_gets_alone(exports: Path, tmp_path: Path) -> None:
    model = extremis.load(exports, threads=1)
    keys = [label.key for label in model.predict(TEXTS[0], k=3)[0].labels]
    questions = [
        {"texts": TEXTS[n % 3 : n % 3 + 1 + n % 4], "k": 1 + n % 7, "filter": keys[: n % 3], "explain": n % 5 == 0}
        for n in range(60)
    ]
    with (
        serving(exports, tmp_path / "log", "--wait", "20", "--threads", "1") as service,
        ThreadPoolExecutor(20) as pool,
    ):
        for question, (status, answer) in zip(questions, pool.map(service.ask, questions), strict=True):
            assert status == 200, answer
            assert answered(answer) == expected(model, question)
            for of in answer["predictions"]:
                for label in of["labels"]:
                    assert ("explanation" in label) == question["explain"]
                    if question["explain"]:
                        assert label["explanation"]["score"] == pytest.approx(label["score"], abs=1e-4)
        _, metrics = service.ask(path="/metrics")
        batches = re.search(r"^extremis_batch_texts_count (\S+)", metrics, re.MULTILINE)
        assert batches is not None
        assert float(batches[1]) < len(questions)
        assert 'extremis_requests_total{status="200"} 60.0' in metrics
        assert service.ask(path="/health") == (200, {"status": "ok"})
        assert service.ask(path="/ready") == (200, {"export": model.url, "problem": ""})


BAD: dict[str, tuple[Any, int, str]] = {
    "no JSON": (b"{", 422, "Invalid JSON"),
    "no UTF-8": (b'{"texts": ["\xff\xfe"]}', 422, "Invalid JSON"),
    "half of a pair": (b'{"texts": ["\\ud800"]}', 422, "Invalid JSON"),
    "deep": (b"[" * 100_000, 422, "Invalid JSON"),
    "a list": ([], 422, "Input should be an object"),
    "no texts": ({}, 422, "texts: Field required"),
    "an empty list": ({"texts": []}, 422, "texts: List should have at least 1 item"),
    "a number": ({"texts": [1]}, 422, "texts.0: Input should be a valid string"),
    "10 MB": ({"texts": ["a" * 10_000_000]}, 413, "the body has more than 4,194,304 bytes"),
    "a long text": ({"texts": ["a", "a" * 20_001]}, 422, "texts.1: String should have at most 20000 characters"),
    "10,000 texts": ({"texts": ["a"] * 10_000}, 422, "texts: List should have at most 1000 items"),
    "k = 0": ({"texts": ["a"], "k": 0}, 422, "k: Input should be greater than or equal to 1"),
    "k of no number": ({"texts": ["a"], "k": "many"}, 422, "k: Input should be a valid integer"),
    "k beyond the limit": ({"texts": ["a"], "k": 10**30}, 422, "k: Input should be"),
    "an unknown field": ({"texts": ["a"], "top": 3}, 422, "top: Extra inputs are not permitted"),
    "an unknown label": ({"texts": ["a"], "filter": ["none such"]}, 422, "unknown label key 'none such'"),
}


def test_bad_input_is_one_message_and_the_service_lives_on(exports: Path, tmp_path: Path) -> None:
    with serving(exports, tmp_path / "log", "--max-k", "1000000") as service:
        for name, (body, status, message) in BAD.items():
            got, answer = service.ask(body)
            assert (got, message in answer["detail"], len(answer["detail"]) < 300) == (status, True, True), (
                name,
                answer,
            )
        assert service.ask(path="/nothing")[0] == 404
        assert service.ask({"texts": ["a ship"]})[0] == 200
        # A wrong question among others harms none of them.
        questions = [{"texts": ["a ship"], "filter": ["none such"] if n == 3 else []} for n in range(9)]
        with ThreadPoolExecutor(9) as pool:
            assert [status for status, _ in pool.map(service.ask, questions)] == [200] * 3 + [422] + [200] * 5


def test_current_is_followed_without_a_lost_request(folder: Path, tmp_path: Path) -> None:
    question = {"texts": TEXTS, "k": 3}
    right = {str(folder / name): expected(extremis.load(folder / name, threads=1), question) for name in ("one", "two")}
    assert right[str(folder / "one")] != right[str(folder / "two")]
    seen, wrong, stop = set(), [], threading.Event()
    with serving(folder, tmp_path / "log", "--threads", "1") as service:

        def ask() -> None:
            while not stop.is_set():
                status, answer = service.ask(question)
                if status != 200 or answered(answer) != right[answer["export"]]:
                    wrong.append(answer)
                seen.add(answer["export"])

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        try:
            for name in ("two", "one"):
                make_current(str(folder / name))
                service.wait_until(lambda: service.ask(path="/ready")[1]["export"] == str(folder / name))
        finally:
            stop.set()
            for asker in askers:
                asker.join()
    assert not wrong
    assert seen == {*right}


def test_a_current_export_that_cannot_be_opened(folder: Path, tmp_path: Path) -> None:
    """Half a copy, no export at all, one of another form: the one before goes on, and /ready says why."""
    half = Path(shutil.copytree(folder / "two", folder / "half"))
    next((half / "vectors").iterdir()).unlink()
    form = Path(shutil.copytree(folder / "two", folder / "form"))
    (form / "_manifest.json").write_text((form / "_manifest.json").read_text().replace('"export"', '"labels"'))
    current = folder / "CURRENT"
    with serving(folder, tmp_path / "log") as service:
        for name in ("half", "nothing", "form", "../../etc"):
            before = service.ask(path="/ready")[1]["problem"]
            current.write_text(f"{name}\n")
            service.wait_until(lambda: service.ask(path="/ready")[1]["problem"] not in ("", before))
            status, ready = service.ask(path="/ready")
            assert (status, ready["export"]) == (200, str(folder / "one"))
            assert service.ask({"texts": ["a ship"]})[0] == 200
        make_current(str(folder / "two"))
        service.wait_for(r"serving \S+/two\n")
        assert service.ask(path="/ready") == (200, {"export": str(folder / "two"), "problem": ""})


def test_files_that_change_under_it(folder: Path, tmp_path: Path) -> None:
    """Written over by others, an export answers no more, or as before; whole again, it answers again."""
    files = {path: path.read_bytes() for path in folder.glob("one/**/*") if path.is_file()}
    with serving(folder, tmp_path / "log") as service:
        for path, content in files.items():
            with path.open("r+b") as file:
                file.write(bytes(len(content)))
        for _ in range(5):
            status, answer = service.ask({"texts": ["a ship in a storm", ""]})
            assert status in (200, 503), answer
        for path, content in files.items():
            path.write_bytes(content)
        service.wait_until(lambda: service.ask({"texts": ["a ship in a storm"]})[0] == 200)


def test_a_request_at_work_is_answered_before_the_end(exports: Path, tmp_path: Path) -> None:
    with serving(exports, tmp_path / "log", "--wait", "1500") as service, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(service.ask, {"texts": TEXTS * 100, "k": 10})
        time.sleep(0.5)
        service.process.send_signal(signal.SIGTERM)
        status, answer = asked.result(60)
        assert (status, len(answer["predictions"])) == (200, 600)
        assert service.process.wait(60) == 0


@pytest.mark.parametrize(("place", "message"), [("run", "expected an export"), ("exports/nothing", "nothing")])
def test_what_is_no_export_is_refused_at_the_start(exports: Path, place: str, message: str) -> None:
    words = [sys.executable, str(ROOT / "examples" / "serve.py"), str(exports.parent / place), "--port", "0"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(PATH), check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert message in done.stderr


@pytest.mark.slow
def test_the_page_answers_a_first_question_without_a_network(exports: Path, tmp_path: Path) -> None:
    with serving(exports, tmp_path / "log") as service, browser() as driver:
        driver.get(f"http://127.0.0.1:{service.port}/")

        def find(selector: str) -> Any:
            for _ in range(300):
                found = driver.find_elements("css selector", selector)
                if found:
                    return found[0]
                time.sleep(0.1)
            raise AssertionError(f"no {selector}")

        find("button.execute").click()
        assert '"predictions"' in find(".live-responses-table .microlight").text
        assert console_messages(driver) == []
        assert all(url.startswith(f"http://127.0.0.1:{service.port}/") for url in requests(driver))
