"""Records of a run while it trains: metrics.jsonl, and services that its numbers are sent to."""

from trainer.tracking.services import Service, tag
from trainer.tracking.tracker import NoTracker, Tracker, Watcher, read_metrics

__all__ = ["NoTracker", "Service", "Tracker", "Watcher", "read_metrics", "tag"]
