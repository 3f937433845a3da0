"""The current one among the exports of a folder: a file names it, and is replaced whole."""

from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import check_name, folder
from schemas.manifest import is_published
from schemas.storage import join
from schemas.views.relative import relative, resolve

CURRENT = "CURRENT"
_LONGEST = 1024  # bytes of the file


def follow(url: str) -> str:
    """Return `url` itself where it is an export, or no folder of exports; of such a folder, the current one.

    Raises InputError: none of them is current; TableError: CURRENT names nothing; StorageError.
    """
    if is_published(url):
        return url
    current = find_current(url)
    if current is None and any(is_published(join(url, name)) for name in storage.list_names(url)):
        raise InputError(
            f"{url}: a folder of which none is current. Name an export in it, or make one current with extremis export "
            "--current."
        )
    return current or url


def find_current(url: str) -> str | None:
    """Return the URL of the export that CURRENT names in the folder `url`; None where there is no such file.

    Raises TableError where it names nothing; StorageError.
    """
    place = join(url, CURRENT)
    try:
        content = storage.read_bytes(place)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return join(url, folder(content[:_LONGEST].decode().strip()))
    except (InputError, UnicodeDecodeError):
        raise TableError(
            f"{place}: names no folder beside it, but {content[:60]!r}. Write the name of an export into it, or "
            "export again with --current."
        ) from None


def own_name(url: str) -> str:
    """Return the name by which CURRENT would name the export at `url`. Raises InputError where it cannot."""
    return check_name("--current: the folder", relative(resolve(url, ".."), resolve(url, ".")))


def switch(url: str) -> str:
    """Make the export at `url` the current one of the folder that it is in, and return the file that says so.

    Whoever opens the folder has either this one or the one before. Raises InputError, StorageError.
    """
    if not is_published(url):
        raise InputError(f"{url}: no finished table here, which could be current.")
    parent, name = resolve(url, ".."), own_name(url)
    storage.write_bytes(join(parent, CURRENT), f"{name}\n".encode())
    return join(parent, CURRENT)
