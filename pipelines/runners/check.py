"""Start-up check of an engine's workers: do their versions match, can they read INPUT, and can they write?

    launcher.json ─▶ each worker, as it starts (versions) and at its first work (access) ─▶ HOST-PROCESS.json

The check runs with the first flow. A problem is reported in one message that names the worker and the remedy. Without
the check, a flow would fail late or wait forever.
"""

import contextlib
import json
import os
import platform
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import apache_beam

from pipelines.common.progress import Progress
from schemas import storage
from schemas.cores import cores
from schemas.errors import ExtremisError, InputError, StorageError
from schemas.manifest import code_version
from schemas.sizes import say_bytes
from schemas.storage import join

OPTION = "extremis_question"  # Beam option that gives a worker the question before its work
_ANSWERED: set[str] = set()  # on a worker: ids of the questions that the worker has answered
_LAUNCHER = "launcher.json"


def versions() -> str:
    """Return the versions of Extremis, Beam and Python (such as 3.10), which must match on launcher and workers."""
    python = ".".join(platform.python_version_tuple()[:2])
    return f"Extremis {code_version()}, Beam {apache_beam.version.__version__}, Python {python}"


@dataclass(frozen=True)
class Question:
    """Question to every worker: does it have these versions, can it read `reads`, and write below `folder`?"""

    id: str
    versions: str
    reads: Sequence[str]
    folder: str
    asked: float  # seconds since 1970 by the launcher's clock

    @staticmethod
    def ask(reads: Sequence[str], folder: str) -> "Question":
        """Write a question for the workers below `folder`, and return it. Raises StorageError."""
        question = Question(uuid.uuid4().hex, versions(), reads, join(folder, "check"), time.time())
        storage.write_bytes(join(question.folder, _LAUNCHER), str(question).encode(), durable=False)
        return question

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    def answers(self) -> list[dict[str, Any]]:
        """Return the workers' answers so far. Raises StorageError, and InputError if a worker reports a problem."""
        answers = []
        for name in storage.list_names(self.folder):
            with contextlib.suppress(FileNotFoundError, ValueError):
                answers.append(json.loads(storage.read_bytes(join(self.folder, name))))
        for refusal in (each["lacks"] for each in answers if "lacks" in each):
            raise InputError(refusal)
        return sorted((each for each in answers if "worker" in each), key=lambda each: str(each["worker"]))

    def summarize(self, say: Progress) -> None:
        """Report which workers have answered. Raises InputError if the work is done, but no answer has arrived."""
        workers = self.answers()
        if not workers:
            raise InputError(
                f"the workers answered, but their files are not in {self.folder}: on the workers, this path is a "
                "different folder. Use a shared file system or an object store for DATA, RUN and OUT."
            )
        machines = {str(each["host"]): f"{each['cores']} cores, {say_bytes(each['memory'])}" for each in workers}
        last = max(each["seconds"] for each in workers)
        hosts = "; ".join(f"{host}: {facts}" for host, facts in sorted(machines.items()))
        say(f"{len(workers)} worker{'s' * (len(workers) > 1)} answered, the last after {last:.1f} s ({hosts})")


def compare_versions(beam_options: Mapping[str, Any]) -> None:
    """Compare a worker's versions with the versions in the runner's options. Raises InputError.

    This check runs before Beam's own check, which reports different versions only in a log.
    """
    asked = beam_options.get(f"beam:option:{OPTION}:v1")
    if asked:
        _answer(Question(**json.loads(asked)), write=False)


def answer(question: Question) -> None:
    """Answer the question on a worker, once per process. Raises InputError that names the worker and the problem."""
    if question.id not in _ANSWERED:
        _answer(question, write=True)
        _ANSWERED.add(question.id)


def _answer(question: Question, write: bool) -> None:
    host, here = socket.gethostname(), versions()
    worker = f"{host}, process {os.getpid()}"
    url = join(question.folder, f"{host}-{os.getpid()}.json")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    seconds = time.time() - question.asked
    facts = {"worker": worker, "host": host, "cores": cores(), "memory": memory, "seconds": seconds}
    try:
        if here != question.versions:
            raise InputError(
                f"the worker {worker} has {here}; the launching process has {question.versions}. Install the same "
                "versions on every machine of the engine, or in the image of its workers."
            )
        if write:
            for read in (join(question.folder, _LAUNCHER), *question.reads):
                _require_readable(worker, read)
            storage.write_bytes(url, json.dumps(facts).encode(), durable=False)
    except InputError as error:
        with contextlib.suppress(ExtremisError, OSError):  # the launcher may read this before the engine's error
            storage.write_bytes(url, json.dumps({"lacks": str(error)}).encode(), durable=False)
        raise
    except (StorageError, OSError) as error:
        raise InputError(
            f"the worker {worker} cannot write to {question.folder}: {error} Give the worker permission, or use "
            "another location."
        ) from None


def _require_readable(worker: str, url: str) -> None:
    remedy = "Use a shared file system or an object store that every machine can access at the same URL."
    try:
        if storage.exists(url):
            with storage.open_read(url) as file:
                file.read(1)
            return
    except (ExtremisError, OSError) as error:
        raise InputError(f"the worker {worker} cannot read {url}: {error} {remedy}") from None
    raise InputError(f"the worker {worker} cannot see the file {url}, which the launching process can see. {remedy}")
