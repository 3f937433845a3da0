"""Page of the report: one HTML file that opens from a disk, without a network, and holds what it needs.

Texts reach it in two ways: through Jinja2, which escapes them, and as JSON that the script puts on the page as text.
A content security policy lets only the page's own script run, and nothing load.
"""

import base64
import gzip
import hashlib
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

from schemas.errors import InputError, MissingExtra
from schemas.secrets import redact

LARGEST = 5_000_000  # bytes of a page


def render(facts: Mapping[str, Any], body: Mapping[str, Any]) -> bytes:
    """Render the page. `facts` fill the template; `body` (charts, queries, labels) is for the script.

    Raises InputError where the `report` extra is not installed, or the page would be larger than LARGEST.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from plotly.offline import get_plotlyjs

        from extremis.reporting.terms import TERMS, explain
    except ImportError as error:
        raise MissingExtra(f"a report needs {error.name}", "report") from None
    script = _asset("page.js")
    # The script has four megabytes, one and a half compressed; current browsers unpack it by themselves.
    library = base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    environment = Environment(
        loader=PackageLoader("extremis.reporting", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"number": _number, "redact": redact, "term": explain}
    html = environment.get_template("page.html").render(
        **facts,
        terms=TERMS,
        style=_asset("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        library=library,
        body=_inert(json.dumps(body, separators=(",", ":"), allow_nan=False, ensure_ascii=False)),
    )
    data = html.encode("utf-8", "replace")
    if len(data) > LARGEST:
        raise InputError(
            f"the page would have {len(data):,} bytes, more than {LARGEST:,}. Ask for fewer --queries, or fewer runs."
        )
    return data


def _inert(text: str) -> str:
    """Escape JSON so that no string in it is HTML markup."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return (importlib.resources.files("extremis.reporting") / name).read_text("utf-8")


def _number(value: Any) -> str:
    """Format a value for people."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
