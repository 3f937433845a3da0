"""URLs of one prefix as seen from another, so that both can move together."""

import os
import posixpath

from schemas.errors import InputError


def resolve(url: str, place: str) -> str:
    """Return the URL of `place`, which is relative to the prefix `url`, or absolute.

    Raises InputError where it leads out of the bucket.
    """
    if "://" in place or place.startswith("/"):
        return place
    scheme, separator, path = url.rpartition("://")
    resolved = posixpath.normpath(posixpath.join(path, place))
    if separator and (resolved == "." or resolved.startswith("..")):
        raise InputError(f"{url}: names {place!r}, which leads out of {scheme}://. Make it again.")
    return scheme + separator + resolved


def relative(url: str, target: str) -> str:
    """Return `target` as seen from the prefix `url`: relative within one store and bucket, else absolute."""
    scheme, separator, path = url.rpartition("://")
    other, other_separator, there = target.rpartition("://")
    if not other_separator:
        there = os.path.abspath(there)
    if (scheme, separator) != (other, other_separator):
        return other + other_separator + there
    if not separator:
        return posixpath.relpath(there, os.path.abspath(path))
    if path.partition("/")[0] != there.partition("/")[0]:
        return target
    return posixpath.relpath("/" + there, "/" + path)
