"""Removal of credentials: a URL may have a password or a signature, and errors, logs and pages name URLs."""

import re

_USER = re.compile(r"(?<=://)[^/\s@'\"<>]*:[^/\s@'\"<>]*@")  # user:password@
_QUERY = re.compile(
    r"(?i)(?<=[?&])((?:x-(?:amz|goog)-(?:signature|credential|security-token)|signature|sig|token|access_token|"
    r"awsaccesskeyid|googleaccessid|api_?key|secret|password|key)=)[^&\s'\"<>#]+"
)


def redact(text: str) -> str:
    """Replace the user and password of any URL in `text` by `***`, and signatures and tokens of its query."""
    return _QUERY.sub(r"\1***", _USER.sub("***@", text)) if "://" in text else text
