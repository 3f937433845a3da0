"""A report as a plain program reads it: the tables with their exact values, the charts, and the rest of the text."""

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """The tables of a page by name, as rows of cells, each with its exact value if it has one; and all other text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.words: list[str] = []
        self.body: dict[str, Any] = {}
        self._rows: list[list[str]] | None = None
        self._exact: str | None = None
        self._cell = self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        if of.get("data-csv") is not None:
            self._rows = self.tables.setdefault(str(of["data-csv"]), [])
        self._script = tag == "script" and of.get("id") == "body"
        if tag == "tr" and self._rows is not None:
            self._rows.append([])
        self._cell = tag in ("td", "th") or (self._cell and tag in ("abbr", "small", "i"))
        if tag in ("td", "th") and self._rows is not None:
            self._exact = of.get("data-value")
            self._rows[-1].append(self._exact or "")

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")
        self._script = False
        if tag == "table":
            self._rows = None

    def handle_data(self, data: str) -> None:
        if self._script:
            self.body = json.loads(data)
        elif self._cell and self._rows is not None:
            if not self._exact:
                self._rows[-1][-1] += data
        elif data.strip():
            self.words.append(data.strip())

    def table(self, name: str) -> list[dict[str, str]]:
        head, *rows = next(rows for key, rows in self.tables.items() if key == name)
        return [dict(zip(head, (cell.strip() for cell in row), strict=True)) for row in rows]

    def chart(self, section: str, identity: str) -> Any:
        """The lines of a chart as {name: {x: y}}, or the sentence in its place."""
        chart = next(chart for chart in self.body["charts"][section] if chart["id"] == identity)
        if "said" in chart:
            return chart["said"]
        return {trace["name"]: dict(zip(trace["x"], trace["y"], strict=True)) for trace in chart["figure"]["data"]}
