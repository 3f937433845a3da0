"""Options of a training's process, which change no number of its run."""

from dataclasses import dataclass

from extremis.training.prometheus import LOOPBACK


@dataclass(frozen=True)
class ProcessOptions:
    """Options of a training's process.

    `metrics_host`, `metrics_port`: where rank 0 serves metrics for Prometheus; port None: nowhere. `grace`: seconds
    after SIGTERM or SIGHUP for saving a checkpoint; 0: the process ends at once.
    """

    metrics_host: str = LOOPBACK
    metrics_port: int | None = None
    grace: float = 25.0


DEFAULT = ProcessOptions()
