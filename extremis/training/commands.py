"""Commands that made a data set or a run, kept in it: `extremis report` shows them for whoever makes it again."""

from extremis.console import command_line
from schemas import storage
from schemas.layout import DataLayout, RunLayout
from schemas.records.json_files import read_json, write_json


def keep_command(place: DataLayout | RunLayout) -> None:
    """Add the command line at work to those of `place`, if there is one. Raises TableError, StorageError."""
    line = command_line()
    if line:
        write_json(place.commands, {"commands": [*commands_of(place), line]}, indent=1)


def commands_of(place: DataLayout | RunLayout) -> list[str]:
    """Return the commands that made `place`, oldest first. Raises TableError: damaged."""
    return list(read_json(place.commands)["commands"]) if storage.exists(place.commands) else []
