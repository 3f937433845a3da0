"""Use Flink's REST interface to cancel jobs, and to get facts that a job server reports late or not at all."""

import contextlib
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from apache_beam.options.pipeline_options import FlinkRunnerOptions, PipelineOptions
from apache_beam.portability.api import beam_job_api_pb2
from apache_beam.runners.portability.portable_runner import PortableMetrics
from google.protobuf import json_format

from schemas.errors import ExtremisError, InputError
from schemas.waits import waiting

_ANSWER_SECONDS = 5.0
_SLOT_SECONDS = 5.0  # time until the slots of a job that has just ended are free
_ENDED = ("FINISHED", "FAILED", "CANCELED")
_STARTS_MANAGERS = ("kubernetes.cluster-id", "yarn.application.id")  # settings of a JobManager that starts TaskManagers


@dataclass(frozen=True)
class Flink:
    """Flink's JobManager at `url`, the address in --flink_master."""

    url: str

    @staticmethod
    def of(options: PipelineOptions) -> "Flink | None":
        """Return the JobManager that the options name, or None."""
        master = options.view_as(FlinkRunnerOptions).flink_master or ""
        if not master or master.startswith("["):
            return None
        return Flink((master if "://" in master else f"http://{master}").rstrip("/"))

    def ask(self, path: str, method: str = "GET") -> Any:
        """Return the JobManager's answer to a request. Raises OSError, ValueError."""
        request = urllib.request.Request(f"{self.url}/{path}", method=method)
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
            return json.load(answer)

    def require_slots(self, parallelism: int) -> None:
        """Check for free slots. Raises InputError if there are too few, and ExtremisError if Flink does not answer."""
        counts: dict[str, Any] = {}
        try:
            for _ in waiting("free slots on Flink", seconds=_SLOT_SECONDS, every=0.5):
                counts = self.ask("overview")
                if counts["slots-available"] >= parallelism:
                    return
            settings = {each["key"] for each in self.ask("jobmanager/config")}
        except (OSError, ValueError, KeyError) as error:
            raise ExtremisError(
                f"no Flink JobManager answers at --flink_master={self.url}: {getattr(error, 'reason', error)}. "
                "Start the JobManager, or give the address of its REST interface."
            ) from None
        if settings.isdisjoint(_STARTS_MANAGERS):
            raise InputError(
                f"Flink at {self.url} has too few free slots for the job: {counts['slots-available']} of "
                f"{counts['slots-total']} slots are free on {counts['taskmanagers']} TaskManagers, {parallelism} are "
                f"needed, and {counts['jobs-running']} jobs are running. Lower the parallelism, start TaskManagers, "
                "raise taskmanager.numberOfTaskSlots, or end other jobs."
            )

    def find(self, name: str) -> tuple[str, str]:
        """Return the job's id and state; both are empty if no job has this name, or if Flink does not answer."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            for job in self.ask("jobs/overview")["jobs"]:
                if job["name"] == name:
                    return job["jid"], job["state"]
        return "", ""

    def cancel(self, name: str, seconds: float) -> bool:
        """Cancel the job `name` as soon as Flink lists the job; return whether the job ended within `seconds`."""
        for _ in waiting("Flink to cancel the job", seconds=seconds, every=0.3):
            number, state = self.find(name)
            if state in _ENDED:
                return True
            if number:
                with contextlib.suppress(OSError, ValueError):
                    self.ask(f"jobs/{number}?mode=cancel", "PATCH")
        return False

    def metrics(self, name: str) -> PortableMetrics:
        """Return Beam's metrics of a finished job. Raises OSError, ValueError, LookupError."""
        found = self.ask(f"jobs/{self.find(name)[0]}/accumulators")["user-task-accumulators"]
        values = {each["name"]: each["value"] for each in found}
        response = json_format.Parse(values["__metricscontainers"], beam_job_api_pb2.GetJobMetricsResponse())
        return PortableMetrics(response)
