"""The HTTP service of `extremis serve`: answers questions by an export in batches, and follows the current export."""

import asyncio
import contextlib
import hmac
import itertools
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Annotated, Any, NamedTuple

import orjson
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, Counter, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from extremis.console import say, show_activity
from schemas import code_version, storage
from schemas.errors import FRONT_END, ExtremisError, InputError, TableError, option
from scoring.predict import Model
from scoring.predict import Prediction as Predicted

TEXTS_A_BATCH = 256
_STATED = ("max_labels", "min_probability", "precision", "at_least", "allowed", "never", "groups")  # as by a question
CONCURRENT = 1000  # requests at a time; more get 503
GONE = 499  # status in the metrics of requests whose client has gone

# Metrics for Prometheus, beside those of the process.
_BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
REQUESTS = Counter("extremis_requests", "questions, by status", ["status"])
SECONDS = Histogram("extremis_request_seconds", "from a question to its answer", buckets=_BUCKETS)
BATCHES = Histogram("extremis_batch_texts", "texts that were answered at once", buckets=(1, 4, 16, 64, 256, 1024))
SWITCHES = Counter("extremis_switches", "exports that became the current one")
FAILURES = Counter("extremis_failures", "exports that could not be opened, or broke")


class Label(BaseModel):
    key: str
    text: str
    score: float
    probability: float | None = Field(description="that the label is right, of a calibrated export")
    explanation: dict[str, Any] | None = Field(None, description="what adds up to the score, where it is asked for")


class Prediction(BaseModel):
    known_tokens: int = Field(description="0: the labels are out of the most frequent labels of training")
    none_of_these: bool | None = Field(description="the best label is less likely right than wrong")
    decision: str = Field(description="name of what decides how many labels there are, and which")
    labels: list[Label]
    explained: dict[str, Any] | None = Field(None, description="why labels are given or not, by key, where asked for")


class Answer(BaseModel):
    export: str
    predictions: list[Prediction]


class Job(NamedTuple):
    """A question, the next message of its client, and the future of its answer.

    `stated`: of the decision, for all texts. `of_texts`: labels that are stated for each text.
    """

    question: Any
    receive: Receive
    answer: "asyncio.Future[tuple[Model, Sequence[Predicted]]]"
    stated: dict[str, Any]
    of_texts: dict[str, Any]

    def joins(self, jobs: "Sequence[Job]") -> bool:
        """Return whether it can be answered together with `jobs`: if they state the same, for all texts."""
        return not jobs or (self.stated == jobs[0].stated and not self.of_texts and not jobs[0].of_texts)

    def is_gone(self) -> bool:
        """Return whether the client has gone: after a body, only the end of the connection is a message."""
        message: Any = self.receive()
        try:
            message.send(None)  # what awaiting it would do first
        except StopIteration:
            return True
        message.close()
        return False


class Service:
    """The current model, and the questions that wait for it. One thread predicts, and another one explains."""

    def __init__(self, open_model: Callable[[], Model], token_file: str | None, most: int) -> None:
        self._open, self._token_file, self._most = open_model, token_file, most
        self.tokens = self._read_tokens()
        self.problem, self.broken = "", False
        self.model = self._load()
        self._waiting = list[Job]()
        self._work: asyncio.Task[None] | None = None
        self._predicting, self._explaining = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def _read_tokens(self) -> list[bytes]:
        """Return the tokens of callers, of which the file has one a line; [] without a file. Raises ExtremisError."""
        if self._token_file is None:
            return []
        with contextlib.suppress(FileNotFoundError):
            if tokens := storage.read_bytes(self._token_file).split():
                return tokens
        raise InputError(parameter="token_file", got=self._token_file, expected="a file with a token on each line")

    def _load(self) -> Model:
        """Open the current export, and predict once, because some parts are loaded with the first text."""
        model = self._open()
        model.predict(["a first text", ""])
        return model

    def compile(self) -> None:
        """Compile the model's path for single texts in the background, while NumPy answers."""

        def work(model: Model) -> None:
            try:
                if model.compile():
                    say(f"{model.url}: single texts are answered by compiled loops")
            except Exception as error:  # the export may have changed meanwhile; NumPy answers, or tells the caller
                say(f"{model.url}: single texts are not answered by compiled loops: {error}", "warning")

        threading.Thread(target=work, args=[self.model], daemon=True).start()

    async def reload(self) -> bool:
        """Switch to the current export; print a line, once per error, if the export cannot be opened."""
        try:
            self.model = await asyncio.to_thread(self._load)
        except Exception as error:
            FAILURES.inc()
            if str(error) != self.problem:
                self.problem = str(error)
                say(f"keeps serving {self.model.url}: {error}", "warning")
            return False
        self.problem, self.broken = "", False
        SWITCHES.inc()
        say(f"serving {self.model.url}")
        self.compile()
        return True

    async def follow(self, poll: float) -> None:
        """Check every `poll` seconds for other tokens, and for another current export. A batch keeps its model."""
        told = ""
        while True:
            await asyncio.sleep(poll)
            try:
                self.tokens, told = await asyncio.to_thread(self._read_tokens), ""
            except ExtremisError as error:
                if told != (told := str(error)):
                    say(f"keeps the earlier tokens: {error}", "warning")
            try:
                is_current = await asyncio.to_thread(lambda: self.model.is_current)
            except Exception:  # CURRENT is being written, or names nothing
                is_current = False
            if self.broken or not is_current:
                await self.reload()

    async def answer(self, question: Any, receive: Receive) -> bytes:
        """Return the JSON of an answer. Raises ClientDisconnect, ExtremisError."""
        loop = asyncio.get_running_loop()
        stated = {name: value for name in _STATED if (value := getattr(question, name)) is not None}
        per_text = [name for name in ("allowed", "never") if any(isinstance(n, list) for n in stated.get(name, ()))]
        of_texts = {name: stated.pop(name) for name in per_text}
        job = Job(question, receive, loop.create_future(), stated, of_texts)
        self._waiting.append(job)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._answer_batches())
        model, predictions = await job.answer
        listed = list[dict[str, Any]]()
        for text, each in zip(question.texts, predictions, strict=True):
            of = {"known_tokens": each.known_tokens, "none_of_these": each.none_of_these, "decision": each.decision}
            explained: dict[str, Any] = {"labels": each.labels}
            if question.explain:
                if job.is_gone():
                    raise ClientDisconnect
                own = stated | {name: keys[len(listed)] for name, keys in of_texts.items()}
                asked = model, text, each.labels, question.explain, own
                explained = await loop.run_in_executor(self._explaining, _explain, *asked)
            listed.append({**of, **explained})
        return orjson.dumps({"export": model.url, "predictions": listed})

    async def _answer_batches(self) -> None:
        """Answer the questions that wait, until none waits: what arrives during a batch is the next batch."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            jobs, others, texts = list[Job](), list[Job](), 0
            for job in self._waiting:
                if job.is_gone():
                    job.answer.cancel()
                elif texts < TEXTS_A_BATCH and job.joins(jobs):
                    jobs.append(job)
                    texts += len(job.question.texts)
                else:
                    others.append(job)
            self._waiting = others
            if not jobs:
                continue
            BATCHES.observe(texts)
            outcomes = await loop.run_in_executor(self._predicting, _predict, self.model, jobs, self._most)
            if any(isinstance(outcome, TableError) for outcome in outcomes):  # files were written over
                self.broken = not await self.reload()
                outcomes = await loop.run_in_executor(self._predicting, _predict, self.model, jobs, self._most)
            for job, outcome in zip(jobs, outcomes, strict=True):
                if job.answer.done():  # cancelled, because the service ends
                    continue
                if isinstance(outcome, Exception):
                    job.answer.set_exception(outcome)
                else:
                    job.answer.set_result(outcome)


@contextlib.contextmanager
def _naming_fields() -> Iterator[None]:
    """Spell options as the fields of a question in the block."""
    before = os.environ.pop(FRONT_END, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[FRONT_END] = before


@_naming_fields()
def _predict(model: Model, jobs: Sequence[Job], most: int) -> "list[tuple[Model, Sequence[Predicted]] | Exception]":
    """Predict at most `most` labels a text for jobs together, or one by one if a job fails."""
    questions = [job.question for job in jobs]
    texts = [text for question in questions for text in question.texts]
    try:
        decision = model.decide(**jobs[0].stated)
        if is_open := decision.max_labels is None:
            decision = decision.model_copy(update={"max_labels": most + 1, "name": decision.name})
        found = model.predict(texts, decision, **jobs[0].of_texts)
        if is_open and max(len(each.labels) for each in found) > most:
            raise InputError(
                f"a text has more than {most:,} labels by this decision, {decision.name!r}. State max_labels, or serve "
                "with a greater limit."
            )
        predictions = iter(found)
        return [(model, [*itertools.islice(predictions, len(question.texts))]) for question in questions]
    except Exception as error:
        return [error] if len(jobs) == 1 else [_predict(model, [job], most)[0] for job in jobs]


def _explain(
    model: Model, text: str, labels: Sequence[Any], asked: bool | Sequence[str], stated: dict[str, Any]
) -> dict[str, Any]:
    """Explain the labels of a text, or those that are `asked` for, given or not."""
    if isinstance(asked, bool):
        explained = (model.explain(text, label.key, **stated) for label in labels)
        found = [{**asdict(label), "explanation": asdict(why)} for label, why in zip(labels, explained, strict=True)]
        return {"labels": found}
    return {"labels": labels, "explained": {key: asdict(model.explain(text, key, **stated)) for key in asked}}


def make_app(service: Service, poll: float, most: int, max_texts: int, max_chars: int, max_body: int) -> ASGIApp:
    """Return the app with its routes. Only /predict needs a token: probes and collectors of metrics have none."""
    text, key = (Annotated[str, Field(max_length=length)] for length in (max_chars, 1000))
    keys = Annotated[list[key], Field(max_length=1000)]  # type: ignore[valid-type]

    class Question(BaseModel):
        model_config = ConfigDict(
            extra="forbid",
            json_schema_extra={"example": {"texts": ["a ship in a storm"], "max_labels": 5, "explain": False}},
        )
        texts: Annotated[list[text], Field(min_length=1, max_length=max_texts)]  # type: ignore[valid-type]
        max_labels: Annotated[int | None, Field(ge=1, le=most)] = None
        min_probability: Annotated[float | None, Field(gt=0, le=1)] = None
        precision: Annotated[float | None, Field(gt=0, le=1, description="as met on held-out rows")] = None
        at_least: Annotated[int | None, Field(ge=0, le=most)] = None
        allowed: Annotated[keys | list[keys] | None, Field(description="keys of labels, or keys for each text")] = None  # type: ignore[valid-type]
        never: Annotated[keys | list[keys] | None, Field(description="as for allowed")] = None  # type: ignore[valid-type]
        groups: Annotated[list[keys] | None, Field(max_length=1000, description="at most one label of each")] = None  # type: ignore[valid-type]
        explain: Annotated[bool | keys, Field(description="explain each label, or the labels with these keys")] = False  # type: ignore[valid-type]

    async def read(request: Request) -> Question:
        """Read a question, and check the token and the limits."""
        kind, _, token = request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        known = [hmac.compare_digest(token, each) for each in service.tokens]
        if service.tokens and not (kind.lower() == b"bearer" and any(known)):
            raise HTTPException(401, "expected the header Authorization: Bearer TOKEN, with a token of this service")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > max_body:
                raise HTTPException(413, f"the body has more than {max_body:,} bytes")
        try:
            return Question.model_validate_json(bytes(body))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise HTTPException(422, f"{place}: {first['msg']}" if place else first["msg"]) from None

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(service.follow(poll))
        service.compile()
        yield
        following.cancel()

    pages: FastAPI = FastAPIOffline(
        title="Extremis",
        description="The best labels of texts. Change the texts below, and press Execute.",
        version=code_version(),
        lifespan=lifespan,
        redoc_url=None,
        swagger_ui_parameters={"tryItOutEnabled": True, "defaultModelsExpandDepth": 0, "docExpansion": "full"},
    )
    failures: dict[int | str, dict[str, Any]] = {status: {"model": dict[str, str]} for status in (401, 413, 422, 503)}
    asked = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": Question.model_json_schema()}}}
    }
    shown = [Depends(HTTPBearer())] if service.tokens else []  # for the page; `read` checks the token

    @pages.post("/predict", response_model=Answer, responses=failures, openapi_extra=asked, dependencies=shown)
    async def predict(request: Request) -> Response:
        """Return the best labels of each text, best first."""
        began = time.perf_counter()
        status, detail = 200, ""
        try:
            body = await service.answer(await read(request), request.receive)
        except HTTPException as error:
            status, detail = error.status_code, error.detail
        except (ClientDisconnect, asyncio.CancelledError):
            status, detail = GONE, "the client has gone, or the service ends"
        except ExtremisError as error:
            of_the_export = isinstance(error, TableError) or not isinstance(error, InputError)
            status, detail = 503 if of_the_export else 422, str(error)
        except Exception as error:
            status, detail = 500, f"a fault of the service: {type(error).__name__}"
            say(traceback.format_exc(), "warning")
        REQUESTS.labels(status).inc()
        SECONDS.observe(time.perf_counter() - began)
        if status == 200:
            return Response(body, media_type="application/json")
        return JSONResponse({"detail": detail}, status, {"WWW-Authenticate": "Bearer"} if status == 401 else None)

    @pages.get("/health")
    async def health() -> dict[str, str]:
        """Return whether the process is alive."""
        return {"status": "ok"}

    @pages.get("/ready", responses={503: failures[503]})
    async def ready() -> dict[str, str]:
        """Return the export that is served; `problem`: the reason why the current export is not served."""
        if service.broken:
            raise HTTPException(503, service.problem)
        return {"export": service.model.url, "problem": service.problem}

    @pages.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @pages.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("docs")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer predictions without FastAPI's routing, which would take longer than all else around a model."""
        if scope["type"] == "http" and (scope["method"], scope["path"]) == ("POST", "/predict"):
            await (await predict(Request(scope, receive)))(scope, receive, send)
        else:
            await pages(scope, receive, send)

    return app


def run(service: Service, app: ASGIApp, host: str, port: int, grace: int) -> int:
    """Serve until SIGTERM or Ctrl-C, and answer what was asked before; return the number of answers.

    Raises InputError if the port cannot be opened.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=CONCURRENT)
    except OSError as error:
        raise InputError(f"{option('port', port)}: cannot listen on {host}: {error}. Choose another port.") from None
    limits: Any = {"limit_concurrency": CONCURRENT, "timeout_graceful_shutdown": grace}
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, **limits))
    # uvicorn has handlers of its own while it serves, and raises their signals again at its end.
    before = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        show_activity("")
        place = f"[{host}]" if ":" in host else host
        say(f"serving {service.model.url} at http://{place}:{listening.getsockname()[1]}")
        server.run([listening])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return server.server_state.total_requests
