"""What a refused command must give: its status, one message with a remedy, no traceback, no secret, nothing behind."""

import re
from pathlib import Path

from tests.command import Done, call

SECRET = "hunter2"
# A message tells what to do, or what was expected.
REMEDY = re.compile(
    r"\b(fix|give|make|remove|run|copy|check|expected|export|set|write|pass|install|lower|raise|choose|leave|add|point|"
    r"name|restore|shard|mine|known|did you mean|there (?:are|is|can be)|start|should|must|needs|at most|at least|fit|"
    r"did you|is the path right|is it a|are the|wait|change|convert|let it|resume|say|see|divide|multiply|have to|"
    r"save|rename)\b",
    re.IGNORECASE,
)


def listing(folder: Path) -> list[str]:
    """List the files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def check_message(message: str) -> None:
    """An error tells what to do, in few words and without secrets."""
    assert REMEDY.search(message), message
    assert len(message) < 5000, message[:5000]
    assert SECRET not in message


def check(done: Done, status: int | tuple[int, ...], *words: str) -> None:
    """The command ended with one of `status`, and with one message that keeps the rules; `words` are in it."""
    said = done.out + done.err
    assert done.status in ((status,) if isinstance(status, int) else status), said
    assert "Traceback" not in said, said
    assert "a bug in Extremis" not in said, said
    assert SECRET not in said, said
    if done.status:
        errors = [line for line in done.err.splitlines() if line.lower().startswith("error: ")]
        assert len(errors) == 1, said
        check_message(done.err[done.err.lower().index("error: ") :])
    for word in words:
        assert word in said, f"{word!r} is not in: {said}"


def run(*arguments: str | Path, status: int | tuple[int, ...] = 2, words: tuple[str, ...] = ()) -> Done:
    """Run a command that must be refused so."""
    done = call(*arguments)
    check(done, status, *words)
    return done
