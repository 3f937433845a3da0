"""Removes passwords, signatures and tokens from the URLs in errors, logs and pages; and control characters."""

import re

# Matches user:password@ and user@, but not container@account. A password may contain slashes; host:8080/path@v1 has a
# port and no password.
_USER = re.compile(
    r"(?<=://)(?:[^/\s@'\"<>]*:(?![0-9]+(?:[/\s'\"<>]|$))[^\s'\"<>]*@|(?<!abfs://)(?<!abfss://)[^/\s@'\"<>]+@)"
)
_BUCKET = re.compile(r"(?i)(?<![a-z0-9])(?:s3a?|gcs|gs)://(?!arn:)(?=[^/\s'\"<>]*[:@])[^\s'\"<>]*?(?=[\s'\"<>]|$)")
_QUERY = re.compile(
    r"(?i)(?<=[?&])((?:x-(?:amz|goog)-(?:signature|credential|security-token)|signature|sig|token|access_token|"
    r"awsaccesskeyid|googleaccessid|api_?key|secret|password|key)=)[^&\s'\"<>#]+"
)
# Control characters: they move the cursor, change colours, or turn the direction of writing.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")


def redact(text: str) -> str:
    """In every URL in `text`, replace user names, passwords, and signatures and tokens in the query with `***`."""
    if "://" not in text:
        return text
    return _QUERY.sub(r"\1***", _USER.sub("***@", _BUCKET.sub(_hide_bucket, text)))


def without_controls(text: str) -> str:
    """Replace each control character in `text`, except tabs and line ends, with a replacement character."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def redact_known(text: str, url: str) -> str:
    """Redact `text`, and also replace the user name and password of `url` wherever they appear in `text`."""
    for match in _USER.finditer(url):
        user, _, password = match[0][:-1].partition(":")
        for secret in filter(None, (match[0][:-1], password, user)):
            text = text.replace(secret, "***")
    return redact(text)


def has_credentials(url: str) -> bool:
    """Return whether an S3 or GCS URL has credentials before the bucket name, which never contains a colon or an @."""
    return _BUCKET.search(url) is not None


def _hide_bucket(match: re.Match[str]) -> str:
    """Keep the scheme and the part after the last @, which contains no secret."""
    scheme, _, rest = match[0].partition("://")
    _, mark, place = rest.rpartition("@")
    return f"{scheme}://***@{place}" if mark else f"{scheme}://***"
