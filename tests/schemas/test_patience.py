"""An outage is waited out for as long as EXTREMIS_PATIENCE says; what a store refuses is told at once."""

import threading
from collections.abc import Callable, Iterator

import pytest

from schemas import owners, storage
from schemas.errors import AccessError, ClaimedError, ClaimLostError, InputError, StorageError
from schemas.owners import Owner
from schemas.sizes import PATIENCE, parse_seconds
from tests.schemas.flaky import AwayFileSystem, Clock, clocked

pytest.importorskip("s3fs")
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from s3fs.errors import translate_boto_error

URL = "away://bucket/x"
MINUTE = 60.0


def answer(status: int, code: str) -> Callable[[], Exception]:
    """Return S3's answer to a request as s3fs raises it."""
    body = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return lambda: translate_boto_error(ClientError(body, "GetObject"))


OUTAGES = {
    "refused": lambda: ConnectionRefusedError(111, "Connection refused"),
    "no host": lambda: EndpointConnectionError(endpoint_url="http://store"),
    "time-out": lambda: TimeoutError(110, "no answer within 60 seconds"),
    "500": answer(500, "InternalError"),
    "503": answer(503, "SlowDown"),
    "429": answer(429, "TooManyRequestsException"),
    "throttled": answer(400, "ThrottlingException"),
    "slow": answer(400, "RequestTimeout"),
    "gateway": answer(504, "GatewayTimeout"),
}
REFUSALS = {
    "permission": (answer(403, "AccessDenied"), AccessError),
    "wrong key": (answer(403, "InvalidAccessKeyId"), AccessError),
    "wrong secret": (answer(403, "SignatureDoesNotMatch"), AccessError),
    "no key": (NoCredentialsError, AccessError),
    "no bucket": (answer(404, "NoSuchBucket"), (FileNotFoundError, InputError)),
    "no file": (answer(404, "NoSuchKey"), (FileNotFoundError, InputError)),
}
MISTAKES = {  # tried again as without patience: a response may have been damaged
    "region": answer(400, "AuthorizationHeaderMalformed"),
    "not there": answer(501, "NotImplemented"),
    "damaged": lambda: OSError(74, "bytes 0 to 9 are damaged"),
}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    with clocked(monkeypatch, "30m", 8.0) as made:
        storage.write_bytes(URL, b"before")
        yield made


def away_until(clock: Clock, moment: float, error: Callable[[], Exception]) -> None:
    AwayFileSystem.error = staticmethod(lambda: error() if clock() < moment else None)


@pytest.mark.parametrize("kind", OUTAGES)
def test_an_outage_of_20_minutes_is_waited_out(kind: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        lambda: storage.read_bytes(URL),
        lambda: storage.read_range(URL, 0, 3),
        lambda: storage.write_bytes(URL, b"after"),
        lambda: storage.list_names("away://bucket"),
        lambda: storage.remove("away://bucket/gone"),
        lambda: storage.create_bytes("away://bucket/new", b"1"),
    ]
    for request in requests:
        before, began = storage.retries, clock()
        away_until(clock, began + 20 * MINUTE, OUTAGES[kind])
        request()
        assert 20 * MINUTE <= clock() - began < 21 * MINUTE
        assert 150 < storage.retries - before < 600  # at most 8 seconds pass between two attempts
    assert storage.read_bytes(URL) == b"after"
    away_until(clock, clock() + 20 * MINUTE, OUTAGES[kind])
    monkeypatch.delenv(PATIENCE)
    with pytest.raises(StorageError, match=r"could not read away://bucket/x after 5 attempt\(s\)"):
        storage.read_bytes(URL)


def test_an_outage_that_lasts_longer_is_an_error_then(clock: Clock) -> None:
    away_until(clock, clock() + 50 * MINUTE, OUTAGES["503"])
    began = clock()
    with pytest.raises(StorageError, match=r"could not write away://bucket/x after \d{3} attempt\(s\): SlowDown; fix"):
        storage.write_bytes(URL, b"after")
    assert 30 * MINUTE <= clock() - began < 31 * MINUTE


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_is_told_at_once(kind: str, clock: Clock) -> None:
    error, expected = REFUSALS[kind]
    away_until(clock, clock() + 20 * MINUTE, error)
    began, before = clock(), storage.retries
    for request in (lambda: storage.read_bytes(URL), lambda: storage.write_bytes(URL, b"after")):
        with pytest.raises(expected):
            request()
    assert (clock(), storage.retries) == (began, before)


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_no_outage(kind: str, clock: Clock) -> None:
    away_until(clock, clock() + 20 * MINUTE, MISTAKES[kind])
    with pytest.raises(StorageError, match=r"after 5 attempt\(s\)"):
        storage.read_bytes(URL)


def test_no_attempt_starts_once_the_reader_has_given_up(clock: Clock) -> None:
    cancelled = threading.Event()

    def refuse() -> Exception:
        cancelled.set()
        return OUTAGES["refused"]()

    away_until(clock, clock() + MINUTE, refuse)
    with pytest.raises(StorageError, match=r"after 1 attempt\(s\)"):
        storage.read_range(URL, 0, 3, cancelled)


@pytest.mark.parametrize("first_back", ["owner", "other"])
def test_who_comes_back_first_goes_on_and_the_other_publishes_nothing(
    first_back: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that waits for the store finds the claim taken once the store answers, and is not carried out."""
    monkeypatch.setattr(owners, "LEASE_SECONDS", 0.5)
    until, others = clock() + 20 * MINUTE, list[owners.Claim]()

    def refuse() -> Exception | None:
        if first_back == "other" and not others:
            others.append(owners._acquire("near://bucket/out", Owner.here("mined"), None))
            storage.write_bytes("near://bucket/out/result", b"of the other")
        return OUTAGES["refused"]() if clock() < until else None

    def work() -> None:
        with owners.claimed("away://bucket/out", "mined") as claim:
            storage.write_bytes("away://bucket/out/result", b"of nobody else")
            claim._confirm()
            AwayFileSystem.error = staticmethod(refuse)
            storage.write_bytes("away://bucket/out/result", b"of the owner")
            claim.require()
            with pytest.raises(ClaimedError, match="being mined by process"):
                owners._acquire("near://bucket/out", Owner.here("mined"), None)

    if first_back == "owner":
        monkeypatch.setattr(owners, "BEAT_SECONDS", 0.05)
        work()
        assert storage.read_bytes("near://bucket/out/result") == b"of the owner"
    else:
        with pytest.raises(ClaimLostError, match="taken over by process") as lost:
            work()
        assert lost.value.exit_status == 5
        assert storage.read_bytes("near://bucket/out/result") == b"of the other"
    AwayFileSystem.store.clear()


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5h", 5400), ("30m", 1800), ("7d", 604800)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text, "") == seconds


@pytest.mark.parametrize("text", ["", "soon", "30 minutes", "-1m", "1m30s", "1e3"])
def test_what_is_no_time_is_refused_before_any_request(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE, text)
    with pytest.raises(InputError, match=rf"EXTREMIS_PATIENCE={text}: expected a number with a unit, for example 90s"):
        storage.read_bytes(URL)
