"""What one sees of a run while it goes: a note beside the bar, and figures for Prometheus."""

import re
import urllib.error
import urllib.request

import pytest

from extremis.training.metrics_state import Live
from extremis.training.prometheus import LOOPBACK, serving
from schemas.errors import InputError
from trainer.tracking import tag

LINE = re.compile(r"^[a-zA-Z_:][a-zA-Z0-9_:]* (NaN|[+-]Inf|[-+0-9.e]+)$")


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def test_the_exposition_is_prometheus_text() -> None:
    live = Live(batch=512)
    live.step(7, 100, 1.25)
    live.record("validation", 7, {"epoch": 0, "P@1": 12.5, "late": True, "digests": {"a": "b"}})
    live.record("train", 7, {"loss": float("nan"), "drop": float("inf")})
    lines = live.exposition().splitlines()
    assert all(line.startswith("# ") or LINE.match(line) for line in lines), lines
    values = dict(line.split(" ") for line in lines if not line.startswith("#"))
    assert values["extremis_step"] == "7"
    assert values["extremis_steps_total"] == "100"
    assert values["extremis_validation_P_at_1"] == "12.5"
    assert values["extremis_train_loss"] == "NaN"
    assert values["extremis_train_drop"] == "+Inf"
    assert not any("digests" in name for name in values)


def test_a_figure_that_is_unknown_now_is_gone() -> None:
    live = Live(batch=1)
    live.record("adoption", 1, {"epoch": 4, "table_epoch": 3, "late": True})
    assert "extremis_adoption_table_epoch 3" in live.exposition()
    assert live.note() == "table 3, 1 epoch(s) back, late"
    live.record("adoption", 1, {"epoch": 4, "table_epoch": 3, "late": False})
    assert live.note() == "table 3"
    live.record("adoption", 2, {"epoch": 5, "table_epoch": None, "late": False})
    assert "table_epoch" not in live.exposition()
    assert live.note() == ""


def test_figures_are_served_on_loopback_and_only_while_it_goes() -> None:
    said: list[str] = []
    with serving(lambda: "extremis_step 1\n", 0, LOOPBACK, said.append) as port:
        assert said == [f"figures for Prometheus at http://127.0.0.1:{port}/metrics"]
        assert fetch(f"http://127.0.0.1:{port}/metrics") == "extremis_step 1\n"
        with pytest.raises(urllib.error.HTTPError):
            fetch(f"http://127.0.0.1:{port}/etc/passwd")
        with pytest.raises(InputError, match=f"--metrics-port {port}"), serving(str, port, LOOPBACK, said.append):
            pass
    with pytest.raises(urllib.error.URLError):
        fetch(f"http://127.0.0.1:{port}/metrics")


def test_without_a_port_nothing_listens() -> None:
    with serving(str, None, LOOPBACK, pytest.fail) as port:
        assert port is None


def test_scalars_are_grouped_by_what_they_are() -> None:
    assert tag("train", "loss") == "train/loss"
    assert tag("train", "encoder_lr") == "rate/encoder"
    assert tag("epoch", "seconds_stream") == "time/stream"
    assert tag("epoch", "rows_per_second") == "throughput/rows_per_second"
    assert tag("epoch", "table_age") == "table/age"
    assert tag("validation", "P@1") == "validation/P@1"
