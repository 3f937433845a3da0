"""Commands that made a run, kept in it: what `extremis report` shows for whoever wants to make it again."""

from extremis.console import command_line
from schemas import storage
from schemas.layout import RunLayout
from schemas.records.json_files import read_json, write_json


def keep_command(run: RunLayout) -> None:
    """Add the command line at work to those of RUN, if there is one. Raises TableError, StorageError."""
    line = command_line()
    if line:
        write_json(run.commands, {"commands": [*commands_of(run), line]}, indent=1)


def commands_of(run: RunLayout) -> list[str]:
    """Return the commands that made RUN, oldest first. Raises TableError: damaged."""
    return list(read_json(run.commands)["commands"]) if storage.exists(run.commands) else []
