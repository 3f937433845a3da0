"""`extremis serve` as a user starts it: a process at a port, asked, switched, stopped, and given nonsense."""

import asyncio
import contextlib
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

import extremis
from extremis import Decision
from scoring.export_versions import make_current
from tests.browser import browser, console_messages, requests
from tests.command import call, command, environment, refused

pytest.importorskip("fastapi_offline", reason="the service needs the extra `http`")
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

    def ask(self, body: Any = None, path: str = "/predict", token: str = "") -> tuple[int, Any]:
        """Return the status and the body of an answer; `body` is bytes, or an object to be sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            connection.request("GET" if sent is None else "POST", path, sent, headers)
            answer = connection.getresponse()
            content = answer.read()
            assert b"Traceback" not in content
            return answer.status, json.loads(content) if path != "/metrics" else content.decode()

    def connect(self, sent: bytes, *, slow: bool = False) -> socket.socket:
        """Send bytes over a connection that stays open; a `slow` one has room for little that it has not read."""
        connection = socket.socket()
        if slow:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(sent)
        return connection

    def count(self, status: int) -> int:
        """Return the number of questions that had this status."""
        found = re.search(rf'^extremis_requests_total{{status="{status}"}} (\S+)', self.ask(path="/metrics")[1], re.M)
        return int(float(found[1])) if found else 0


@contextlib.contextmanager
def serving(place: Path, log: Path, *options: str) -> Iterator[Service]:
    words = command("serve", place, "--port", "0", "--poll", "0.1", *options)
    with log.open("w") as out:
        process = subprocess.Popen(words, stderr=out, stdout=out, text=True, env=environment())
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
    stated = {name: value for name, value in question.items() if name not in ("texts", "explain")}
    found = model.predict(question["texts"], **stated)
    return [
        [
            each.decision,
            each.known_tokens,
            each.none_of_these,
            [(of.key, of.text, of.score, of.probability) for of in each.labels],
        ]
        for each in found
    ]


def answered(answer: dict[str, Any]) -> list[Any]:
    return [
        [
            each["decision"],
            each["known_tokens"],
            each["none_of_these"],
            [tuple(label[name] for name in ("key", "text", "score", "probability")) for label in each["labels"]],
        ]
        for each in answer["predictions"]
    ]


# What a question may state about labels, three of which are given to its first text.
DECISIONS: tuple[Callable[[list[str]], dict[str, Any]], ...] = (
    lambda keys: {},
    lambda keys: {"max_labels": 1 + len(keys)},
    lambda keys: {"max_labels": 7, "never": keys[:2]},
    lambda keys: {"min_probability": 0.05},
    lambda keys: {"precision": 0.3, "at_least": 1, "groups": [keys]},
    lambda keys: {"allowed": keys, "precision": 0.2},
)


def test_a_text_has_the_same_answer_alone_in_a_batch_from_the_command_line_and_over_http(
    exports: Path, tmp_path: Path
) -> None:
    model = extremis.load(exports, threads=1)
    keys = [label.key for label in model.predict(TEXTS[0], max_labels=3)[0].labels]
    questions = [
        {"texts": TEXTS[n % 3 : n % 3 + 1 + n % 4], "explain": n % 5 == 0, **DECISIONS[n % len(DECISIONS)](keys)}
        for n in range(40)
    ]
    with serving(exports, tmp_path / "log", "--threads", "1") as service, ThreadPoolExecutor(20) as pool:
        for question, (status, answer) in zip(questions, pool.map(service.ask, questions), strict=True):
            assert status == 200, answer
            assert answered(answer) == expected(model, question)
            alone = [expected(model, {**question, "texts": [text]}) for text in question["texts"]]
            assert answered(answer) == [of for (of,) in alone]
            for of in answer["predictions"]:
                for label in of["labels"]:
                    assert ("explanation" in label) == question["explain"]
                    if question["explain"]:
                        assert label["explanation"]["score"] == pytest.approx(label["score"], abs=1e-4)
        assert service.count(200) == 40
        assert service.ask(path="/health") == (200, {"status": "ok"})
        assert service.ask(path="/ready") == (200, {"export": model.url, "problem": ""})
        (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        assert call("predict", exports, tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--max-labels", "4").status == 0
        _, answer = service.ask({"texts": TEXTS, "max_labels": 4})
        service.wait_for("single texts are answered by compiled loops")
        singles = [service.ask({"texts": [text], "max_labels": 4})[1]["predictions"] for text in TEXTS]
        assert [of for (of,) in singles] == answer["predictions"]
    for line, of in zip((tmp_path / "out.jsonl").read_text().splitlines(), answer["predictions"], strict=True):
        row, columns = json.loads(line), ("labels", "texts", "scores", "probabilities")
        assert row["known_tokens"] == of["known_tokens"]
        for key, text, *numbers, label in zip(*(row[name] for name in columns), of["labels"], strict=True):
            assert [key, text] == [label["key"], label["text"]]
            assert numbers == pytest.approx([label["score"], label["probability"]], rel=1e-6)


def test_a_stored_decision_gives_what_one_gives_that_is_stated(data: Path, exports: Path, tmp_path: Path) -> None:
    """To the digit: in Python, on the command line, over HTTP, and by an export that has the decision."""
    best = [label.key for label in extremis.load(exports).predict(TEXTS[0], max_labels=3)[0].labels]
    decision = Decision(min_probability=0.05, at_least=2, never=(best[1],), groups=((best[0], best[2]),), name="shop")
    (tmp_path / "shop.toml").write_bytes(decision.to_toml())
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    stored, run = tmp_path / "stored", exports.parent / "run"
    stated = ("--decision", tmp_path / "shop.toml")
    assert call("export", data, run, stored, *stated).status == 0
    asked = json.loads(decision.model_dump_json(exclude={"name", "max_labels", "precision", "allowed"}))
    found: dict[Path, list[Any]] = {}
    for place, words in ((exports, stated), (stored, ())):
        out = tmp_path / f"{place.name}.jsonl"
        assert call("predict", place, tmp_path / "in.jsonl", out, *words).status == 0
        model = extremis.load(place, threads=1)
        python = model.predict(TEXTS, decision if words else None)
        assert {each.decision for each in python} == {"shop"}
        found[place] = [[(of.key, of.score, of.probability) for of in each.labels] for each in python]
        for line, labels in zip(out.read_text().splitlines(), found[place], strict=True):
            row = json.loads(line)
            assert row["labels"] == [key for key, *_ in labels]
            assert row["scores"] == pytest.approx([score for _, score, _ in labels], rel=1e-6)
        with serving(place, tmp_path / "log", "--threads", "1") as service:
            status, answer = service.ask({"texts": TEXTS, **(asked if words else {})})
        assert status == 200, answer
        over_http = [
            [(of["key"], of["score"], of["probability"]) for of in each["labels"]] for each in answer["predictions"]
        ]
        assert over_http == found[place]
    assert found[exports] == found[stored]
    assert any(len(labels) > 2 for labels in found[stored])


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_column_has_the_labels_that_its_row_may_have(exports: Path, tmp_path: Path, form: str) -> None:
    model = extremis.load(exports, threads=1)
    keys, place, out = model.labels.keys, tmp_path / f"in.{form}", tmp_path / "out.jsonl"
    sets = [keys[n * 7 : n * 9] for n in range(len(TEXTS))]  # the first one is empty
    cells: list[Any] = [" | ".join(own) for own in sets] if form == "csv" else sets
    table = pa.table({"text": TEXTS, "may be": cells})
    if form == "csv":
        pacsv.write_csv(table, place)
    elif form == "parquet":
        pq.write_table(table, place)
    else:
        place.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    words = ("--allowed-by", "may be", "--max-labels", "3")
    for more in ((), ("--wide",)):
        done = call("predict", exports, place, out, *words, *more, "--overwrite")
        assert done.status == 0, done.err
        found = [row["labels"] for row in map(json.loads, out.read_text().splitlines())]
        stated = model.predict(TEXTS, max_labels=3, allowed=sets)
        assert found == [[label.key for label in each.labels] for each in stated]
        assert [len(labels) for labels in found[:2]] == [0, 2]
        assert all({*labels} <= {*own} for labels, own in zip(found, sets, strict=True))
    refused(call("predict", exports, place, tmp_path / "o.csv", "--allowed-by", "kind"), "no such column", "may be")
    refused(call("predict", exports, place, tmp_path / "o.csv", "--allowed-by", "text"), "unknown label key")
    assert not (tmp_path / "o.csv").exists()


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
    "no labels": ({"texts": ["a"], "max_labels": 0}, 422, "max_labels: Input should be greater than or equal to 1"),
    "no number": ({"texts": ["a"], "max_labels": "many"}, 422, "max_labels: Input should be a valid integer"),
    "beyond the limit": ({"texts": ["a"], "max_labels": 10**30}, 422, "max_labels: Input should be"),
    "no share": ({"texts": ["a"], "precision": 7}, 422, "precision: Input should be less than or equal to 1"),
    "a bound that is not met": ({"texts": ["a"], "precision": 0.9999}, 422, "the highest precision that this model"),
    "two limits": ({"texts": ["a"], "precision": 0.1, "min_probability": 0.1}, 422, "give only one of the two"),
    "more than at most": ({"texts": ["a"], "max_labels": 1, "at_least": 2}, 422, "at_least=2 is more than"),
    "a group of one": ({"texts": ["a"], "groups": [["167"]]}, 422, "two or more different keys"),
    "an unknown label in a group": (
        {"texts": ["a"], "groups": [["none", "other"]]},
        422,
        "unknown label key 'none' and 1 others",
    ),
    "sets for other texts": ({"texts": ["a"], "allowed": [["167"], ["133"]]}, 422, "for each of the 1 texts"),
    "all labels": ({"texts": TEXTS, "min_probability": 1e-9}, 422, "a text has more than 3 labels"),
    "an unknown field": ({"texts": ["a"], "top": 3}, 422, "top: Extra inputs are not permitted"),
    "an unknown label": ({"texts": ["a"], "never": ["none such"]}, 422, "unknown label key 'none such'"),
}


def test_bad_input_is_one_message_and_the_service_lives_on(exports: Path, tmp_path: Path) -> None:
    with serving(exports, tmp_path / "log", "--max-labels", "3") as service:
        for name, (body, status, message) in BAD.items():
            got, answer = service.ask(body)
            assert (got, message in answer["detail"], len(answer["detail"]) < 300) == (status, True, True), (
                name,
                answer,
            )
        assert service.ask(path="/nothing")[0] == 404
        assert service.ask({"texts": ["a ship"]})[0] == 200
        # A wrong question among others harms none of them.
        questions = [{"texts": ["a ship"], "never": ["none such"] if n == 3 else []} for n in range(9)]
        with ThreadPoolExecutor(9) as pool:
            assert [status for status, _ in pool.map(service.ask, questions)] == [200] * 3 + [422] + [200] * 5


def test_current_is_followed_without_a_lost_request(folder: Path, tmp_path: Path) -> None:
    question = {"texts": TEXTS, "max_labels": 3}
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_requests_at_work_are_answered_before_the_end(exports: Path, tmp_path: Path, number: signal.Signals) -> None:
    asked = {"texts": TEXTS * 2, "max_labels": 2, "explain": True}
    with serving(exports, tmp_path / "log") as service, ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(service.ask, asked) for _ in range(4)]
        service.wait_until(lambda: "extremis_batch_texts_sum 48.0\n" in service.ask(path="/metrics")[1])
        service.process.send_signal(number)
        answers = [each.result(60) for each in asking]
        assert [(status, len(answer["predictions"])) for status, answer in answers] == [(200, 12)] * 4
        assert service.process.wait(60) == 0
    assert "requests answered: " in (tmp_path / "log").read_text()


def head(body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"POST /predict HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (size, body)


def test_clients_that_are_slow_or_gone_cost_the_others_nothing(exports: Path, tmp_path: Path) -> None:
    many = json.dumps({"texts": ["a ship"] * 300, "max_labels": 100, "explain": True}).encode()
    large = json.dumps({"texts": TEXTS * 50, "max_labels": 100}).encode()
    with serving(exports, tmp_path / "log") as service, contextlib.ExitStack() as stack:
        writers = [service.connect(head(b'{"te', 100)) for _ in range(20)]
        readers = [service.connect(head(large), slow=True) for _ in range(3)]  # which leave an answer unread
        for connection in (*writers, *readers):
            stack.enter_context(connection)
        for sent in (head(b'{"texts', 100), head(many)):  # in the middle of a body, and of an answer
            service.connect(sent).close()
        service.wait_until(lambda: service.count(499) == 2)
        for letter in b'xts"':
            writers[0].sendall(bytes([letter]))
            assert service.ask({"texts": ["a ship"]})[0] == 200
        writers[0].sendall(b': ["a ship"]}'.ljust(92))
        assert writers[0].recv(1000).startswith(b"HTTP/1.1 200")
        stack.close()
        service.wait_until(lambda: service.count(499) == 2 + len(writers) - 1)


class SlowModel:
    """A model whose predictions wait until they may go on; what it was asked is in `asked`."""

    url, is_current = "exports/1", True

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], int]] = []
        self.may_go_on = threading.Semaphore(1)  # for the first texts, of the start

    def decide(self, **stated: Any) -> Decision:
        return Decision(**{"max_labels": 5, **stated})

    def predict(self, texts: Sequence[str], decision: Decision | None = None) -> list[Any]:
        self.asked.append(([*texts], None if decision is None else decision.max_labels))
        assert self.may_go_on.acquire(timeout=30)
        return [SimpleNamespace(labels=[], known_tokens=1, none_of_these=None, decision="") for _ in texts]


def test_a_lone_question_goes_at_once_and_what_arrives_meanwhile_is_the_next_batch() -> None:
    from extremis.service import Service as Answering

    model = SlowModel()
    disconnected = asyncio.Event()

    async def connected() -> Any:
        await asyncio.Event().wait()

    async def ask_all() -> None:
        answering = Answering(lambda: model, None, 100)  # type: ignore[arg-type,return-value]

        def ask(text: str, k: int, receive: Any = connected) -> "asyncio.Task[bytes]":
            others = dict.fromkeys(("min_probability", "precision", "at_least", "allowed", "never", "groups"))
            question = SimpleNamespace(texts=[text], max_labels=k, explain=False, **others)
            return asyncio.create_task(answering.answer(question, receive))

        first = ask("first", 5)
        while len(model.asked) < 2:
            await asyncio.sleep(0.01)
        others = [ask("a", 5), ask("b", 7), ask("c", 5), ask("gone", 5, disconnected.wait), ask("d", 7)]
        await asyncio.sleep(0.01)
        disconnected.set()
        model.may_go_on.release(3)
        answers = await asyncio.gather(first, *others, return_exceptions=True)
        assert [isinstance(answer, bytes) for answer in answers] == [True, True, True, True, False, True]

    asyncio.run(ask_all())
    assert model.asked[1:] == [(["first"], 5), (["a", "c"], 5), (["b", "d"], 7)]


def test_only_callers_with_a_token_are_answered(exports: Path, tmp_path: Path) -> None:
    tokens, question = tmp_path / "tokens", {"texts": ["a ship"]}
    tokens.write_text("")
    for place in (tokens, tmp_path / "none"):
        refused(
            call("serve", exports, "--token-file", place), "--token-file: expected a file with a token on each line"
        )
    tokens.write_text("one\ntwo\n")
    with serving(exports, tmp_path / "log", "--token-file", str(tokens)) as service:

        def statuses() -> list[int]:
            return [service.ask(question, token=token)[0] for token in ("one", "two", "three", "on", "")]

        assert statuses() == [200, 200, 401, 401, 401]
        assert "Authorization: Bearer TOKEN" in service.ask(question)[1]["detail"]
        assert [service.ask(path=path)[0] for path in ("/health", "/ready", "/metrics", "/openapi.json")] == [200] * 4
        tokens.write_text("three\n")
        service.wait_until(lambda: service.ask(question, token="three")[0] == 200)
        assert statuses() == [401, 401, 200, 401, 401]
        tokens.write_text("")
        service.wait_for("keeps the earlier tokens: --token-file: expected a file")
        assert statuses() == [401, 401, 200, 401, 401]


@pytest.mark.parametrize(("place", "message"), [("run", "expected an export"), ("exports/nothing", "nothing")])
def test_what_is_no_export_is_refused_at_the_start(exports: Path, place: str, message: str) -> None:
    refused(call("serve", exports.parent / place, "--port", "0"), message)


def test_a_port_that_is_taken_and_a_missing_extra_are_one_message(
    exports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused(call("serve", exports, "--port", port), f"--port {port}: cannot listen on 127.0.0.1")
    monkeypatch.delitem(sys.modules, "extremis.service")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    refused(call("serve", exports), "a service needs fastapi", "Install the extra `http`")


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
