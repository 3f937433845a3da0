"""Claims on an object store, behind a network that fails: answers are lost, and one still has it."""

import contextlib
import json
import time
from dataclasses import asdict, replace

import pytest

from extremis.at_work import look
from schemas import owners, storage
from schemas.manifest import Manifest, open_manifest
from schemas.owners import Owner, building, claimed, watched
from schemas.storage import join
from schemas.waits import Wait
from tests.faults import Faults, Proxy
from tests.owners import ask_at_once

BUCKET = "owners"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "LEASE_SECONDS", 10.0)
    monkeypatch.setattr(owners, "BEAT_SECONDS", 0.2)


@pytest.mark.parametrize("before", ["nobody", "a dead one"])
@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.slow), 0.05])
def test_of_many_at_once_one_has_it(store: Proxy, before: str, share: float) -> None:
    root = f"s3://{BUCKET}/{before.replace(' ', '-')}-{share}"
    if before == "a dead one":
        dead = replace(Owner.here("mined"), id="d" * 32, born="1")
        storage.write_bytes(join(root, owners.CLAIM_FILE), json.dumps(asdict(dead)).encode())
    with store.failing(Faults(share, seed=7)):
        ends = ask_at_once(root, 5, seconds=1)
    assert ends["alone"] >= 1
    assert ends["alone"] + ends["refused"] == 5, ends
    assert storage.list_names(root) == []


def test_one_creates_what_many_create(store: Proxy) -> None:
    url = f"s3://{BUCKET}/created"
    made = [storage.create_bytes(url, str(number).encode()) for number in range(4)]
    assert made == [True, False, False, False]
    assert storage.read_bytes(url) == b"0"


def test_what_is_built_aside_is_put_in_place_whole(store: Proxy) -> None:
    out = f"s3://{BUCKET}/built"
    with store.failing(Faults(0.1, seed=3)):
        for text, names in ((b"first", ["a", "deep/b", "c"]), (b"second", ["a", "d"])):
            with building(out, "made") as build:
                for name in names:
                    storage.write_bytes(join(build.url, name), text)
                assert not {*names} & {*storage.list_names(out)} or text == b"second"
                build.publish(Manifest(kind="data", parameters={"text": text.decode()}), names)
    assert storage.list_names(out) == ["_manifest.json", "a", "c", "d", "deep"]
    assert storage.read_bytes(join(out, "d")) == b"second"
    assert open_manifest(out).parameters == {"text": "second"}


def test_an_attempt_that_fails_leaves_nothing(store: Proxy) -> None:
    out = f"s3://{BUCKET}/failed"

    def fail() -> None:
        with building(out, "made") as build:
            storage.write_bytes(join(build.url, "a"), b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert storage.list_names(out) == []


def test_who_is_at_work_is_seen_from_elsewhere(store: Proxy) -> None:
    runs, work = f"s3://{BUCKET}/runs", contextlib.ExitStack()
    assert storage.list_below(runs) == {}
    with work, Wait("the next dump") as wait:
        wait._since -= 20
        work.enter_context(watched(f"{runs}/1", "mined"))
        work.enter_context(claimed(f"{runs}/2", "trained"))
        deadline = time.monotonic() + 20
        while len(storage.list_below(runs)) < 4 and time.monotonic() < deadline:  # a claim, a mark, two heartbeats
            time.sleep(0.1)
        found, _ = look(runs)
    assert [(each["place"], each["state"]) for each in found] == [(f"{runs}/1", "not begun"), (f"{runs}/2", "waiting")]
    told = [(each["doing"], each["waits_for"], each["owns"]) for output in found for each in output["processes"]]
    assert told == [("mined", "the next dump", False), ("trained", "the next dump", True)]
    assert storage.list_below(runs) == {}
