"""The site of docs/, built and opened in a browser at the widths of a desk and of a phone."""

import functools
import http.server
import importlib.util
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urldefrag, urljoin

import pytest

from tests.browser import browser, console_messages
from tests.command import ROOT
from tests.pages import DOCS

pytestmark = pytest.mark.slow  # .ci/run gives this file by name

# What sticks out of the window, pictures that did not load, all links, and the places that links may name.
LOOK = """
const edge = document.documentElement.clientWidth + 1;
const scrolls = e => e.closest('pre, .md-typeset__scrollwrap, .md-typeset__table');
const wide = [...document.querySelectorAll('article *')].filter(e => e.getBoundingClientRect().right > edge);
return {
  wide: wide.filter(e => !scrolls(e)).map(e => e.tagName + ' ' + e.textContent.slice(0, 60)),
  broken: [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src),
  links: [...document.querySelectorAll('article a[href]')].map(a => a.href),
  ids: [...document.querySelectorAll('[id]')].map(e => e.id),
}
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("zensical") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the extra docs is not installed (make docs)")
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)  # the site is written beside it
    shutil.copytree(DOCS, folder / "docs")
    for name in ("schemas", "search", "trainer", "pipelines", "scoring", "extremis"):
        (folder / name).symlink_to(ROOT / name)
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, capture_output=True, text=True, cwd=folder, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build" / "site"


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_the_reference_is_made_from_the_code(site: Path) -> None:
    assert "JoinedStream" in (site / "reference" / "index.html").read_text()


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_every_page_fits_its_window_and_its_links_lead_somewhere(
    width: int, height: int, site: Path, address: str
) -> None:
    pages = {}
    with browser(width, height) as driver:
        for place in sorted(site.rglob("index.html")):
            if "decisions" not in place.parts or width > 1000:
                url = urljoin(address, f"{place.parent.relative_to(site).as_posix()}/")
                driver.get(url)
                pages[driver.current_url] = driver.execute_script(LOOK)
        assert console_messages(driver) == []
    assert {url: page["wide"] + page["broken"] for url, page in pages.items() if page["wide"] or page["broken"]} == {}
    for url, page in pages.items() if width > 1000 else ():
        for link in page["links"]:
            target, anchor = urldefrag(link)
            if target.startswith(address) and target.endswith("/"):
                assert target in pages, f"{url}: {link}"
                assert not anchor or anchor in pages[target]["ids"], f"{url}: {link}"
