"""The pages: links lead somewhere, commands parse, and examples are what they say."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from extremis.cli import cli
from papers.claims import Paper, paper_names
from tests.command import ROOT
from tests.pages import DOCS, FENCE, blocks, commands
from trainer.recipe_files import load_recipe, recipe_names

PAGES = sorted(DOCS.glob("*.md"))
PAPERS = sorted((ROOT / "papers").rglob("*.md"))
ALL = [*PAGES, *sorted((DOCS / "decisions").glob("*.md")), *PAPERS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")  # of pages and of images
# Commands of an earlier version; commands of a project with additions, which tests/test_extending.py runs.
UNCHECKED = {DOCS / "results.md", DOCS / "extending.md", *PAPERS}
FOREIGN = ("deploy", "images", "runners")  # pages with options of other programs


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        # The site has the pages of docs and nothing else.
        assert page.is_relative_to(DOCS) <= target.is_relative_to(DOCS), f"{page.name}: {link} leads out of the site"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", [page for page in ALL if page not in UNCHECKED], ids=lambda page: page.name)
def test_command_lines_parse(page: Path) -> None:
    for line in commands(page):
        command, *arguments = shlex.split(line, comments=True)
        given = cli.commands[command].make_context(command, arguments).params
        if given.get("recipe") in recipe_names():
            load_recipe(given["recipe"], given.get("set") or ())


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in FOREIGN], ids=lambda page: page.name)
def test_options_in_the_text_are_those_of_a_command(page: Path) -> None:
    options = [option for command in cli.commands.values() for option in command.params]
    names = {name for option in options for name in (*option.opts, *option.secondary_opts)} | {"--help", "--quick"}
    prose = [line for line in FENCE.sub("", page.read_text()).splitlines() if not line.startswith("    ")]
    spans = [span.partition(" -- ")[0] for line in prose for span in re.findall(r"`([^`]+)`", line)]
    spans = [span for span in spans if not span.startswith("python -m ")]
    named = {option for span in spans for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", span)}
    assert named <= names


def test_the_ways_through_the_code_name_functions_that_exist() -> None:
    text = (DOCS / "architecture.md").read_text().partition("## The packages")[0]
    steps = re.findall(r"^\d+\. (.*(?:\n   .*)*)", text, re.MULTILINE)
    assert len(steps) == 23
    for step in steps:
        defined: set[str] = set()
        for span in re.findall(r"`([^`]+)`", step):
            if span.endswith(".py"):
                tree = ast.parse((ROOT / span).read_text())
                kinds = (ast.FunctionDef, ast.ClassDef)
                defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
            else:
                assert span in defined, f"{span}: {step}"


def test_the_pages_of_papers_name_places_that_exist() -> None:
    text = "".join(page.read_text() for page in PAPERS)
    places = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+):([\w.]+)`", text)
    assert len(places) > 50
    for module, name in places:
        body = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text()).body
        for part in name.split("."):
            defined = _definitions(body)
            assert part in defined, f"{module}:{name}"
            body = getattr(defined[part], "body", [])
    pages = "".join(page.read_text() for page in ALL if page.stem != "extending")  # its additions are examples
    for path in re.findall(r"\b(?:papers/[\w-]+/|papers/|recipes/)[\w-]+\.(?:toml|md)", pages):
        assert (ROOT / path).exists(), path


def test_the_pages_name_tables_of_papers_that_exist() -> None:
    lines = re.findall(r"python -m papers (\w+)(?:.* --table ([\w-]+))?", "".join(p.read_text() for p in ALL))
    assert len(lines) > 20
    for paper, table in lines:
        assert paper in ("all", "PAPER", "mine", *paper_names()), paper
        assert not table or table in {claim.table for claim in Paper.load(paper).claims}, f"{paper}: {table}"


def _definitions(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return the functions, classes and constants that `body` defines."""
    named: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            named[node.name] = node
        if isinstance(node, ast.Assign):
            named |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return named


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in cli.commands if f"`extremis {name}" not in text and f"make {name}" not in text] == []


def test_the_readme_installs_what_its_python_block_uses() -> None:
    """The extras of your-data.md, which calls the same functions and is typed as it stands."""
    pages = ROOT / "README.md", DOCS / "your-data.md"
    readme, typed = (re.findall(r"pip install '[^\[]*\[(.*)\]'", page.read_text()) for page in pages)
    assert readme == typed != []
    used, known = ({*re.findall(r"extremis\.(\w+)\(", "".join(blocks(page, "python")))} for page in pages)
    assert used == known


def test_every_recipe_is_on_the_page_of_recipes() -> None:
    text = (DOCS / "recipes.md").read_text()
    assert [name for name in recipe_names() if f"`{name}`" not in text] == []


def test_the_reference_names_modules_and_classes_that_exist() -> None:
    named = re.findall(r"^::: ([\w.]+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert len(named) > 5
    for name in named:
        module, _, last = name.rpartition(".")
        source = (ROOT / module.replace(".", "/")).with_suffix(".py")
        whole = (ROOT / name.replace(".", "/")).with_suffix(".py")
        assert whole.exists() or last in _definitions(ast.parse(source.read_text()).body), name


def test_blocks_of_json_and_yaml_are_that() -> None:
    for page in PAGES:
        for language, body in FENCE.findall(page.read_text()):
            if language == "json":
                assert [json.loads(line) for line in body.splitlines() if line.strip()]
            if language == "yaml":
                assert all(job["kind"] in {"Job", "CronJob"} for job in yaml.safe_load_all(body))


def test_jobs_of_kubernetes_run_commands_that_parse() -> None:
    for job in yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "train.yaml").read_text()):
        for container in job["spec"]["template"]["spec"]["containers"]:
            command, *arguments = container["args"]
            cli.commands[command].make_context(command, arguments)


def test_every_page_can_be_found() -> None:
    """In the site's navigation, or by a link from the README or another page."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    named = [page for section in nav for pages in section.values() for page in pages]
    assert len(set(named)) == len(named)
    decisions = {page.relative_to(DOCS).as_posix() for page in (DOCS / "decisions").glob("*.md")}
    assert decisions < set(named) <= {page.name for page in PAGES} | decisions
    linked = {Path(link.partition("#")[0]).name for page in ALL for link in LINK.findall(page.read_text())}
    assert {page.name for page in PAGES} <= linked | set(named)


def test_messages_that_are_explained_are_said() -> None:
    """Every message that troubleshooting.md quotes is in the code."""
    page = (DOCS / "troubleshooting.md").read_text()
    code = "".join(
        path.read_text()
        for package in ("schemas", "search", "pipelines", "trainer", "scoring", "extremis")
        for path in (ROOT / package).rglob("*.py")
    )
    joined = re.sub(r"\{option\('(\w+)'\)\}", lambda name: f"--{name[1].replace('_', '-')}", code)
    joined = re.sub(r'"\s*\n\s*f?"', "", joined)
    for quoted in re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE):
        for part in re.split(r" … ?| \d+ ", quoted):
            assert part.strip("…: ") in joined, quoted


def test_no_text_names_a_document_that_is_not_here() -> None:
    """Pages, and the docstrings that the reference shows, name pages of docs/ alone."""
    packages = ("schemas", "search", "pipelines", "trainer", "scoring", "extremis", "examples", "recipes", "papers")
    sources = [path for package in packages for path in (ROOT / package).rglob("*") if path.suffix in {".py", ".toml"}]
    for path in (*ALL, *sources):
        text = path.read_text()
        assert not re.search(r"\bDESIGN\b|\bHOUSE\b", text), path
        for page in re.findall(r"\bdocs/([a-z-]+\.md)", text):
            assert (DOCS / page).exists(), f"{path}: {page}"
