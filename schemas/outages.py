"""What an error of a store means: whether another attempt may succeed, and whether it is an outage, which ends."""

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from schemas.errors import StorageError, failure_of
from schemas.sizes import PATIENCE, parse_seconds

EXPIRED = "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"  # codes of S3
NO_NAME = "InvalidBucketName"  # code of S3 for a bucket that cannot exist
_PERMANENT = FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError


def patience() -> float:
    """Return the seconds for which storage is tried again in an outage; 0 unless PATIENCE is set. Raises InputError."""
    stated = os.environ.get(PATIENCE, "0")
    return parse_seconds(stated, f"{PATIENCE}={stated}")


def may_pass(error: Exception) -> bool:
    """Return true for errors that may be temporary (network); false for a missing file, no access, a full disk."""
    code = answer_of(error)[1]
    if isinstance(error, _PERMANENT) or failure_of(error) is not StorageError or code == NO_NAME:
        return code in EXPIRED
    if isinstance(error, RuntimeError) and "dictionary changed size" in str(error):
        return True  # fsspec's memory:// lists its files while another thread writes a file
    return isinstance(error, (OSError, *_client_errors()))


def is_outage(error: Exception) -> bool:
    """Return true if the store is away or throttles, or a token has expired; false if it has refused the request."""
    status, code = answer_of(error)
    if not status:
        is_away = isinstance(error, (ConnectionError, TimeoutError, *_client_errors()))
        return is_away and failure_of(error) is StorageError
    passes = status in (408, 425, 429) or (status >= 500 and status != 501)
    return passes or code in (*EXPIRED, "RequestTimeout") or "Throttl" in code


def answer_of(error: Exception) -> tuple[int, str]:
    """Return the status of HTTP and S3's code in a store's answer; 0 and "" for an error without an answer."""
    for each in (error, error.__cause__):
        answer = getattr(each, "response", None)
        if isinstance(answer, Mapping):  # botocore's
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return int(status), str(answer.get("Error", {}).get("Code", ""))
    statuses = (getattr(error, name, None) for name in ("status", "code", "status_code"))
    return next((status for status in statuses if isinstance(status, int)), 0), ""


def _client_errors() -> tuple[Any, ...]:
    try:
        from aiohttp import ClientError
        from botocore.exceptions import BotoCoreError
    except ImportError:  # without the extra `s3`
        return ()
    return BotoCoreError, ClientError, asyncio.TimeoutError
