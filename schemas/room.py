"""Room on a disk: what is about to be written fits there, or nothing is begun."""

from collections.abc import Mapping

from schemas import storage
from schemas.errors import InputError
from schemas.sizes import say_bytes


def require_room(url: str, needs: Mapping[str, int], remedy: str) -> None:
    """Refuse to write more than is free where `url` is, or will be: `needs`, the least bytes by what they are.

    Only local disks say what is free. Raises InputError that ends with `remedy`.
    """
    free = storage.free_bytes(url)
    if free is None or sum(needs.values()) <= free:
        return
    parts = " and ".join(f"{say_bytes(size)} of {what}" for what, size in needs.items())
    raise InputError(f"{url}: at least {parts} are written there, and {say_bytes(free)} are free. {remedy}")
