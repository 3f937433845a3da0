"""Metrics of a run while it trains: a note beside the bar, and an endpoint for Prometheus."""

import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import generate_latest

import extremis
from extremis.metrics import metrics, serve_metrics
from extremis.supervisor import RunMetrics
from schemas import storage
from schemas.errors import InputError
from schemas.states import showing
from schemas.waits import Wait
from trainer.tracking import tag

LOOPBACK = "127.0.0.1"
LINE = re.compile(r"^[a-zA-Z_:][a-zA-Z0-9_:]*({[^}]*})? (NaN|[+-]Inf|[-+0-9.e]+)$")


class Collected:
    collect = staticmethod(metrics)


def exposition(state: RunMetrics) -> str:
    with showing(state.values):
        return generate_latest(Collected()).decode()


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def test_the_exposition_is_prometheus_text() -> None:
    state = RunMetrics(batch=512)
    state.step(7, 100, 1.25)
    state.record("validation", 7, {"epoch": 0, "P@1": 12.5, "late": True, "digests": {"a": "b"}})
    state.record("train", 7, {"loss": float("nan"), "drop": float("inf")})
    lines = exposition(state).splitlines()
    assert all(line.startswith("# ") or LINE.match(line) for line in lines), lines
    values = dict(line.split(" ") for line in lines if not line.startswith("#"))
    assert values["extremis_step"] == "7.0"
    assert values["extremis_steps_total"] == "100.0"
    assert "# TYPE extremis_steps_total gauge" in lines
    assert float(values["extremis_storage_retries_total"]) == storage.retries
    assert all(len(line.split()) > 3 for line in lines if line.startswith("# HELP"))
    assert values["extremis_validation_P_at_1"] == "12.5"
    assert values["extremis_train_loss"] == "NaN"
    assert values["extremis_train_drop"] == "+Inf"
    assert not any("digests" in name for name in values)


def test_a_metric_without_a_number_is_dropped() -> None:
    state = RunMetrics(batch=1)
    state.record("adoption", 1, {"epoch": 4, "table_epoch": 3, "late": True})
    assert "extremis_adoption_table_epoch 3.0" in exposition(state)
    assert state.note() == "table 3, 1 epoch(s) late"
    state.record("adoption", 1, {"epoch": 4, "table_epoch": 3, "late": False})
    assert state.note() == "table 3"
    state.record("adoption", 2, {"epoch": 5, "table_epoch": None, "late": False})
    assert "table_epoch" not in exposition(state)
    assert state.note() == ""


def test_metrics_are_served_on_loopback_and_only_while_it_trains() -> None:
    state = RunMetrics(batch=1)
    state.step(1, 2, 0.5)
    said: list[str] = []
    with showing(state.values), serve_metrics((LOOPBACK, 0), said.append) as port:
        assert said == [f"metrics for Prometheus at http://127.0.0.1:{port}/metrics"]
        assert fetch(f"http://127.0.0.1:{port}/metrics") == exposition(state)
        with pytest.raises(urllib.error.HTTPError):
            fetch(f"http://127.0.0.1:{port}/etc/passwd")
        with (
            pytest.raises(InputError, match=f"metrics_port={port}"),
            serve_metrics((LOOPBACK, port), said.append),
        ):
            pass
    with pytest.raises(urllib.error.URLError):
        fetch(f"http://127.0.0.1:{port}/metrics")


def test_without_a_port_nothing_listens() -> None:
    with serve_metrics(None, pytest.fail) as port:
        assert port is None


def test_a_wait_and_texts_are_metrics() -> None:
    assert exposition(RunMetrics(batch=1)).count("extremis_waiting_seconds 0.0") == 1
    with showing({"stage": 'search "it"', "rows": 5, "rows_total": None}.copy), Wait("the next dump") as wait:
        wait._since -= 100
        lines = exposition(RunMetrics(batch=1)).splitlines()
    assert all(line.startswith("# ") or LINE.match(line) for line in lines), lines
    assert 'extremis_state{stage="search \\"it\\"",waits_for="the next dump"} 1.0' in lines
    assert "extremis_rows 5.0" in lines
    assert not [line for line in lines if "rows_total" in line]
    (waited,) = (float(line.split()[1]) for line in lines if line.startswith("extremis_waiting_seconds"))
    assert 100 <= waited < 110


def test_shard_serves_its_metrics(tmp_path: Path) -> None:
    served = list[str]()

    def listen(event: extremis.Event) -> None:
        if found := re.search(r"http://\S+/metrics", event.text):
            served.append(fetch(found[0]))

    extremis.shard([("a ship", "sea"), ("a cow", "meadow")], tmp_path / "data", metrics_port=0, progress=listen)
    assert "extremis_waiting_seconds 0.0" in served[0]


def test_scalars_are_grouped_by_what_they_are() -> None:
    assert tag("train", "loss") == "train/loss"
    assert tag("train", "encoder_lr") == "rate/encoder"
    assert tag("epoch", "seconds_stream") == "time/stream"
    assert tag("epoch", "rows_per_second") == "throughput/rows_per_second"
    assert tag("epoch", "table_age") == "table/age"
    assert tag("validation", "P@1") == "validation/P@1"
