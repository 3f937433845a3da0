"""Removal of credentials: a URL may have a password or a signature, and errors, logs and pages name URLs."""

import re

# user:password@, where the password may hold slashes (host:8080/path@v1 has a port); and user@, but container@account.
_USER = re.compile(
    r"(?<=://)(?:[^/\s@'\"<>]*:(?![0-9]+(?:[/\s'\"<>]|$))[^\s'\"<>]*@|(?<!abfs://)(?<!abfss://)[^/\s@'\"<>]+@)"
)
_BUCKET = re.compile(r"(?i)(?<![a-z0-9])(?:s3a?|gcs|gs)://(?!arn:)(?=[^/\s'\"<>]*[:@])[^\s'\"<>]*?(?=[\s'\"<>]|$)")
_QUERY = re.compile(
    r"(?i)(?<=[?&])((?:x-(?:amz|goog)-(?:signature|credential|security-token)|signature|sig|token|access_token|"
    r"awsaccesskeyid|googleaccessid|api_?key|secret|password|key)=)[^&\s'\"<>#]+"
)


def redact(text: str) -> str:
    """Replace the user and password of any URL in `text` by `***`, and signatures and tokens of its query."""
    if "://" not in text:
        return text
    return _QUERY.sub(r"\1***", _USER.sub("***@", _BUCKET.sub(_hide_bucket, text)))


def redact_known(text: str, url: str) -> str:
    """Redact `text`, also if it repeats the part before the host of `url` alone."""
    for match in _USER.finditer(url):
        user, _, password = match[0][:-1].partition(":")
        for secret in filter(None, (match[0][:-1], password, user)):
            text = text.replace(secret, "***")
    return redact(text)


def has_credentials(url: str) -> bool:
    """Tell whether a URL of S3 or Google's store names more than a bucket: no bucket has a colon or an @."""
    return _BUCKET.search(url) is not None


def _hide_bucket(match: re.Match[str]) -> str:
    """Keep the scheme, and the part after the last @, which no secret contains."""
    scheme, _, rest = match[0].partition("://")
    _, mark, place = rest.rpartition("@")
    return f"{scheme}://***@{place}" if mark else f"{scheme}://***"
