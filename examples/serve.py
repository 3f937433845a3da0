"""An HTTP service for an export: batches texts of many requests, follows CURRENT, loses no request on SIGTERM.

    pip install 'extremis-xc[http]'
    python examples/serve.py exports/            # then open http://127.0.0.1:8000 and ask

The service uses only `extremis.load`. Change it as needed: fields, authentication, other routes.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Annotated, Any, NamedTuple

import orjson
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import extremis

TEXTS_A_BATCH = 256
CONCURRENT = 1000  # requests at a time; more get 503


class Label(BaseModel):
    key: str
    text: str
    score: float
    probability: float | None = Field(description="that the label is right, of a calibrated export")
    explanation: dict[str, Any] | None = Field(None, description="what adds up to the score, where it is asked for")


class Prediction(BaseModel):
    known_tokens: int = Field(description="0: the labels are the most frequent labels of training")
    none_of_these: bool | None = Field(description="the best label is less likely right than wrong")
    labels: list[Label]


class Answer(BaseModel):
    export: str
    predictions: list[Prediction]


class Failure(BaseModel):
    detail: str


class Job(NamedTuple):
    """A question, and the future of its answer."""

    question: Any
    answer: "asyncio.Future[bytes]"


class Measures:
    """Metrics for Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        to = {"registry": self.registry}
        seconds = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
        self.requests = Counter("extremis_requests", "questions, by status", ["status"], **to)
        self.seconds = Histogram(
            "extremis_request_seconds", "from a question's body to its answer", buckets=seconds, **to
        )
        self.batch = Histogram(
            "extremis_batch_texts", "texts that were answered at once", buckets=(1, 4, 16, 64, 256, 1024), **to
        )
        self.switches = Counter("extremis_switches", "exports that became the current one", **to)
        self.failures = Counter("extremis_failures", "exports that could not be opened, or broke", **to)


class Service:
    """The current model, and the requests that wait for it. One thread predicts; the loop's thread does the rest."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.measures = options, Measures()
        self.problem, self.broken = "", False
        self.model = self.load()
        self.queue: asyncio.Queue[Job] = asyncio.Queue()
        self.thread = ThreadPoolExecutor(1)

    def load(self) -> extremis.Model:
        """Open the current export, and predict once, because some parts are loaded with the first text."""
        options = self.options
        model = extremis.load(options.export, exact=options.exact, threads=options.threads, embedder=options.embedder)
        model.predict(["a first text", ""], k=1)
        return model

    async def reload(self) -> bool:
        """Switch to the current export; print a line, once per error, if the export cannot be opened."""
        try:
            self.model = await asyncio.to_thread(self.load)
        except Exception as error:
            self.measures.failures.inc()
            if str(error) != self.problem:
                self.problem = str(error)
                print(f"keeps serving {self.model.url}: {error}", file=sys.stderr, flush=True)
            return False
        self.problem, self.broken = "", False
        self.measures.switches.inc()
        print(f"serving {self.model.url}", file=sys.stderr, flush=True)
        return True

    async def follow(self) -> None:
        """Check from time to time whether another export is current. Requests in progress keep their model."""
        while True:
            await asyncio.sleep(self.options.poll)
            try:
                is_current = await asyncio.to_thread(lambda: self.model.is_current)
            except Exception:  # CURRENT is being written, or names nothing
                is_current = False
            if self.broken or not is_current:
                await self.reload()

    async def answer_batches(self) -> None:
        """Answer all requests that arrive within a few milliseconds in one batch."""
        loop = asyncio.get_running_loop()
        while True:
            jobs = [await self.queue.get()]
            await asyncio.sleep(self.options.wait / 1000)
            texts = len(jobs[0].question.texts)
            while texts < TEXTS_A_BATCH and not self.queue.empty():
                jobs.append(self.queue.get_nowait())
                texts += len(jobs[-1].question.texts)
            self.measures.batch.observe(texts)
            answers: Sequence[bytes | Exception] = await loop.run_in_executor(
                self.thread, self.answer, self.model, jobs
            )
            if any(isinstance(answer, extremis.TableError) for answer in answers):  # files were written over
                self.broken = not await self.reload()
                answers = await loop.run_in_executor(self.thread, self.answer, self.model, jobs)
            for job, answer in zip(jobs, answers, strict=True):
                if job.answer.done():  # who asked has gone
                    continue
                if isinstance(answer, Exception):
                    job.answer.set_exception(answer)
                else:
                    job.answer.set_result(answer)

    def answer(self, model: extremis.Model, jobs: Sequence[Job]) -> Sequence[bytes | Exception]:
        """Answer jobs together, or one by one if a job fails."""
        questions = [job.question for job in jobs]
        texts = [text for question in questions for text in question.texts]
        left_out = [question.filter for question in questions for _ in question.texts]
        try:
            predictions = iter(model.predict(texts, k=max(question.k for question in questions), filter=left_out))
            return [self.body(model, question, [next(predictions) for _ in question.texts]) for question in questions]
        except Exception as error:
            return [error] if len(jobs) == 1 else [self.answer(model, [job])[0] for job in jobs]

    @staticmethod
    def body(model: extremis.Model, question: Any, predictions: Sequence[extremis.Prediction]) -> bytes:
        """Write an answer as JSON."""
        listed = []
        for text, prediction in zip(question.texts, predictions, strict=True):
            labels = [asdict(label) for label in prediction.labels[: question.k]]
            if question.explain:
                for label in labels:
                    label["explanation"] = asdict(model.explain(text, label["key"]))
            of = {"known_tokens": prediction.known_tokens, "none_of_these": prediction.none_of_these}
            listed.append({**of, "labels": labels})
        return orjson.dumps({"export": model.url, "predictions": listed})


def make_app(service: Service) -> FastAPI:
    """Return the app with its routes."""
    options = service.options
    text, key = (Annotated[str, Field(max_length=most)] for most in (options.max_chars, 1000))

    class Question(BaseModel):
        model_config = ConfigDict(
            extra="forbid", json_schema_extra={"example": {"texts": ["a ship in a storm"], "k": 5, "explain": False}}
        )
        texts: Annotated[list[text], Field(min_length=1, max_length=options.max_texts)]  # type: ignore[valid-type]
        k: Annotated[int, Field(ge=1, le=options.max_k, description="labels of each text")] = 5
        filter: Annotated[list[key], Field(max_length=1000, description="keys of labels to leave out")] = []  # type: ignore[valid-type]
        explain: Annotated[bool, Field(description="explain the terms of each score")] = False

    async def read(request: Request) -> Question:
        """Read a question, and check the limits."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > options.max_body:
                raise HTTPException(413, f"the body has more than {options.max_body:,} bytes")
        try:
            question = Question.model_validate_json(bytes(body))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise HTTPException(422, f"{place}: {first['msg']}" if place else first["msg"]) from None
        return question

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(work()) for work in (service.answer_batches, service.follow)]
        yield
        for task in tasks:
            task.cancel()

    app: FastAPI = FastAPIOffline(
        title="Extremis",
        description="The best labels of texts. Change the texts below, and press Execute.",
        version=extremis.version(),
        lifespan=lifespan,
        redoc_url=None,
        swagger_ui_parameters={"tryItOutEnabled": True, "defaultModelsExpandDepth": 0, "docExpansion": "full"},
    )
    failures: dict[int | str, dict[str, Any]] = {status: {"model": Failure} for status in (413, 422, 503)}
    asked = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": Question.model_json_schema()}}}
    }

    @app.post("/predict", response_model=Answer, responses=failures, openapi_extra=asked)
    async def predict(request: Request) -> Response:
        """Return the best labels of each text, best first."""
        began, status = time.perf_counter(), 500
        try:
            job = Job(await read(request), asyncio.get_running_loop().create_future())
            service.queue.put_nowait(job)
            body, status = await job.answer, 200
            return Response(body, media_type="application/json")
        except HTTPException as error:
            status = error.status_code
            raise
        except extremis.ExtremisError as error:
            of_the_export = isinstance(error, extremis.TableError) or not isinstance(error, extremis.InputError)
            status = 503 if of_the_export else 422
            raise HTTPException(status, str(error)) from None
        finally:
            service.measures.requests.labels(status).inc()
            service.measures.seconds.observe(time.perf_counter() - began)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return whether the process is alive."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"model": Failure}})
    async def ready() -> dict[str, str]:
        """Return the export that is served; `problem`: the reason why the current export is not served."""
        if service.broken:
            raise HTTPException(503, service.problem)
        return {"export": service.model.url, "problem": service.problem}

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(service.measures.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("docs")

    @app.exception_handler(Exception)
    async def fault(_: Request, error: Exception) -> Response:
        return JSONResponse({"detail": f"a fault of the service: {type(error).__name__}"}, 500)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("export", help="an export, or a folder of exports, to follow its current export")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: reachable from other machines")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    parser.add_argument("--wait", type=float, default=1.0, help="milliseconds that a request waits for other requests")
    parser.add_argument("--poll", type=float, default=1.0, help="seconds between checks for another current export")
    parser.add_argument("--grace", type=int, default=25, help="seconds that requests may take after SIGTERM")
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--exact", action="store_true", help="score every label, without an index")
    parser.add_argument("--embedder", help="another path or hub name of the model that made the dense vectors of DATA")
    parser.add_argument("--max-k", type=int, default=100)
    parser.add_argument("--max-texts", type=int, default=1000, help="of a request")
    parser.add_argument("--max-chars", type=int, default=20_000, help="of a text")
    parser.add_argument("--max-body", type=int, default=4 << 20, help="bytes of a request")
    options = parser.parse_args()
    try:
        service = Service(options)
    except extremis.ExtremisError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    config = uvicorn.Config(
        make_app(service),
        host=options.host,
        port=options.port,
        log_level="warning",
        access_log=False,
        limit_concurrency=CONCURRENT,
        timeout_graceful_shutdown=options.grace,
    )
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises the signal again when all requests are answered
    listening = config.bind_socket()
    listening.listen(CONCURRENT)  # from here on, connections are answered
    host, port = listening.getsockname()[:2]
    print(f"serving {service.model.url} at http://{host}:{port}", file=sys.stderr, flush=True)
    uvicorn.Server(config).run([listening])


if __name__ == "__main__":
    main()
