"""Removes passwords, signatures and tokens from the URLs in errors, logs and pages."""

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


def redact(text: str) -> str:
    """In every URL in `text`, replace user names, passwords, and signatures and tokens in the query with `***`."""
    if "://" not in text:
        return text
    return _QUERY.sub(r"\1***", _USER.sub("***@", _BUCKET.sub(_hide_bucket, text)))


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
