"""Makes docs/results.md from the records in benchmarks/results/, and lists records that are older than their code."""

import argparse
import ast
import functools
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md"
SECTIONS = ("Accuracy", "Data that grows", "Sharding", "Mining and embedding", "The stream", "Training", "Faults")
FIELDS = ("title", "section", "claim", "command", "commit", "date", "machine", "columns", "rows", "read", "files")
HEAD = """# Results

For readers who choose or tune recipes: what was measured, with which command, and at which commit.

`python -m benchmarks.results` generates this page from `benchmarks/results/*.json`: change a record, not the page.
Compare ratios: seconds depend on the machine. P@k, PSP@k and R@k are percentages on test splits, with propensity
constants A = 0.55 and B = 1.5. Brackets contain a 95 % interval, or a bar (a limit set before measuring).
"""
OLD = """## Measured before the code changed

The code has changed since these measurements, so a new run can give different figures:
"""
# Calls that show texts to a user: a change of these texts does not change measurements.
MESSAGE_FUNCTIONS = {
    "say",
    "_say",
    "print",
    "echo",
    "secho",
    "warn",
    "warning",
    "info",
    "show_activity",
    "waiting",
    "Wait",
}
SKIPPED = {"ctx", "kind", "type_comment", "type_ignores", "type_params"}  # differ between Python versions


class RecordError(Exception):
    """A record or a run is unusable. Exit status 2."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; with --check compare it, with --run measure again. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="compare the page with the records; write nothing")
    parser.add_argument("--run", metavar="MODULE", help="run benchmarks.MODULE ARGUMENTS, and keep its record")
    options, rest = parser.parse_known_args(arguments)
    try:
        if options.run:
            keep(run(options.run, rest))
        elif rest:
            parser.error(f"unknown arguments: {' '.join(rest)}")
        return check() if options.check else write()
    except RecordError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def write() -> int:
    """Fill in missing digests of records from their commits, and write the page.

    A missing conclusion of a record is only reported; any other missing field raises RecordError.
    """
    for record in read_records():
        if "digest" not in record and not missing({**record, "digest": "to come"}):
            save({**record, "digest": digest(record["files"], record["commit"])})
    records = read_records()
    wrong = _wrong(records)
    if not all(line.endswith(": no read") for line in wrong):
        raise RecordError("\n".join(wrong))
    PAGE.write_text(page(records))
    sys.stderr.writelines(f"{line}: write a sentence to read from its figures\n" for line in wrong)
    return 0


def check(records: Path = RECORDS, shown: Path = PAGE, root: Path = ROOT) -> int:
    """Print faults and stale records. Return 1 if the page does not match the records, else 0."""
    found = read_records(records)
    lines = wrong = _wrong(found)
    if not wrong:
        if shown.read_text() != page(found, root):
            wrong = [f"{shown.name} is not made of the records: run `python -m benchmarks.results`"]
        lines = [*wrong, *(f"stale: {_origin(record)}" for record in stale(found, root))]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return int(bool(wrong))


def read_records(folder: Path = RECORDS) -> list[dict[str, Any]]:
    """Return all records in the page's order: by section, then by file name."""
    records = [{**json.loads(path.read_text()), "name": path.stem} for path in folder.glob("*.json")]
    place = {section: number for number, section in enumerate(SECTIONS)}
    return sorted(records, key=lambda record: (place.get(record.get("section", ""), len(SECTIONS)), record["name"]))


def missing(record: Mapping[str, Any]) -> list[str]:
    """Return the missing or empty fields of a record; if there are none, the inconsistent fields."""
    if lacks := [field for field in (*FIELDS, "digest") if not record.get(field)]:
        return lacks
    columns = record["columns"]
    fits = {
        f"section of {', '.join(SECTIONS)}": record["section"] in SECTIONS,
        "row of the columns' number": all(len(row) == len(columns) for row in record["rows"]),
        "column that `shown` names": {*record.get("shown", ())} <= {*columns},
    }
    return [what for what, right in fits.items() if not right]


def _wrong(records: Iterable[Mapping[str, Any]]) -> list[str]:
    return [f"{record['name']}: no {field}" for record in records for field in missing(record)]


def save(record: Mapping[str, Any]) -> None:
    """Write a record with one line per row, so that changes are easy to see."""
    fields = {name: value for name, value in record.items() if name != "name"}
    rows = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in fields.pop("rows"))
    text = json.dumps(fields, indent=2, ensure_ascii=False).removesuffix("\n}")
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / f"{record['name']}.json").write_text(f'{text},\n  "rows": [\n{rows}\n  ]\n}}\n')


def page(records: Sequence[Mapping[str, Any]], root: Path = ROOT) -> str:
    """Return the page of the records; the code in `root` shows which records are stale."""
    parts = [HEAD]
    for section in SECTIONS:
        own = [_shown(record) for record in records if record["section"] == section]
        parts += [f"## {section}\n", *own] if own else []
    old = ", ".join(record["name"] for record in stale(records, root))
    parts += [f"{OLD}\n{old}.\n"] if old else []
    return "\n".join(parts)


def _shown(record: Mapping[str, Any]) -> str:
    which = [record["columns"].index(name) for name in record.get("shown", record["columns"])]
    lines = [[record["columns"][i] for i in which], ["---"] * len(which)]
    lines += [[str(row[i]) for i in which] for row in record["rows"]]
    table = "\n".join(f"|{'|'.join(cells)}|" for cells in lines)
    commands = "\n".join(f"    {line}" for line in record["command"].splitlines())
    machine = record["machine"]
    if isinstance(machine, Mapping):
        machine = f"{machine['cores']} cores, {machine['cpu']}"
    more = f", {record['seeds']}" if record.get("seeds") else ""
    origin = f"*Commit {record['commit']}, {record['date']}, {machine}{more}.*"
    return f"### {record['title']}\n\n{record['claim']}\n\n{commands}\n\n{table}\n\n{record['read']} {origin}\n"


def _origin(record: Mapping[str, Any]) -> str:
    return f"{record['name']} {record['commit']} {record['date']}"


def stale(records: Iterable[Mapping[str, Any]], root: Path = ROOT) -> list[Mapping[str, Any]]:
    """Return the records whose code has changed since they were measured."""
    return [record for record in records if record.get("digest") != digest(record["files"], root=root)]


def digest(files: Sequence[str], commit: str | None = None, root: Path = ROOT) -> str:
    """Return the digest of code, files and folders below `root`, now or at a commit.

    The digest covers syntax trees without docstrings and messages, and TOML lines without comments. A missing path also
    changes the digest.
    """
    texts: dict[str, str] = {}
    for path in files:
        if commit:
            listed = _git("ls-tree", "-r", "--name-only", commit, "--", path).splitlines()
            texts |= {name: _git("show", f"{commit}:{name}") for name in listed if is_code(name)}
        else:
            found = [root / path] if (root / path).is_file() else [*(root / path).rglob("*")]
            texts |= {str(each.relative_to(root)): each.read_text() for each in found if is_code(each.name)}
    return _hashed({name: _content(text, name.endswith(".py")) for name, text in texts.items()})


@functools.cache
def _content(text: str, python: bool) -> str:
    lines = [line.strip() for line in text.splitlines()]
    return _hashed(syntax_tree(text) if python else [line for line in lines if line and not line.startswith("#")])


def _hashed(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def is_code(name: str) -> bool:
    return name.endswith((".py", ".toml"))


def syntax_tree(source: str) -> Any:
    """Return the syntax tree of a module as lists of texts, without docstrings, messages and positions."""
    return _tree_of(ast.parse(source), False)


def _tree_of(node: Any, message: bool) -> Any:
    if isinstance(node, list):
        return [_tree_of(each, message) for each in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    message = message or isinstance(node, ast.Raise) or (isinstance(node, ast.keyword) and node.arg == "help")
    if isinstance(node, ast.Call):
        message = message or getattr(node.func, "attr", getattr(node.func, "id", "")) in MESSAGE_FUNCTIONS
    text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    if text and message:
        return "message"
    fields = {name: value for name, value in ast.iter_fields(node) if name not in SKIPPED}
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        fields["body"] = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if isinstance(node, ast.JoinedStr):  # Python 3.12 has empty texts in f-strings
        fields["values"] = [part for part in node.values if getattr(part, "value", None) != ""]
    if isinstance(node, ast.Assert):
        fields["msg"] = None
    return [type(node).__name__, *([name, _tree_of(value, message)] for name, value in fields.items())]


def run(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a benchmark; return the JSON object on its last line. Raises RecordError if there is none."""
    if "--quick" in arguments:
        raise RecordError("--quick tries a benchmark: its figures are no record. Run it without --quick.")
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *arguments], stdout=subprocess.PIPE, text=True)
    sys.stdout.write(done.stdout)
    lines = done.stdout.splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        raise RecordError(
            f"benchmarks.{module} ended with status {done.returncode}, without a report: nothing is kept."
        )
    body: dict[str, Any] = json.loads(lines[-1])
    return body


def keep(body: Mapping[str, Any]) -> None:
    """Store a benchmark's report as the record of its command; an earlier record's title and files are kept.

    The conclusion from the earlier figures is removed: the record needs a new conclusion.
    """
    records = read_records()
    old = next((record for record in records if record["command"] == body["command"]), {})
    module, *arguments = body["command"].split()[2:]
    name = module.removeprefix("benchmarks.").replace(".", "_")
    if not old and any(record["name"] == name for record in records):  # a record with other arguments
        name += "_" + (re.sub(r"\W+", "_", " ".join(arguments)).strip("_") or "default")
    path = module.replace(".", "/")
    files = old.get("files", [path if (ROOT / path).is_dir() else f"{path}.py"])
    ratios = {ratio: _with_bar(value, body["bars"].get(ratio)) for ratio, value in body["ratios"].items()}
    save(
        {
            "name": old.get("name", name),
            "title": old.get("title", name),
            "section": old.get("section", "Training"),
            **{field: body[field] for field in ("claim", "command", "commit", "date", "machine")},
            "read": "",
            "files": files,
            "digest": digest(files),
            "columns": ["figure", "value"],
            "rows": [[name, value] for name, value in _flat({**body["figures"], **ratios})],
        }
    )


def _with_bar(value: float, bar: float | str | None) -> float | str:
    return value if bar is None else f"{value} (bar {bar})"


def _flat(figures: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}: ")
        else:
            yield f"{before}{name}", ", ".join(map(str, value)) if isinstance(value, list) else value


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RecordError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
