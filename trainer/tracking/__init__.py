"""Records of a run while it trains: metrics.jsonl, and watchers that its numbers are sent to."""

from trainer.tracking.tracker import Listener, NoTracker, Tracker, read_metrics
from trainer.tracking.watchers import Watcher, tag

__all__ = ["Listener", "NoTracker", "Tracker", "Watcher", "read_metrics", "tag"]
