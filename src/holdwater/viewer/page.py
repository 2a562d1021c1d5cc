"""A page: a request for it, its response, and the templates that render it.

Templates escape every value. `run_pages.py` and its neighbours have the pages, `routes.py` their addresses.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from ..conversation.long_texts import split_cuts
from ..core.errors import BadInput
from ..view import formatting
from .run_pool import RunPool

JSON = "application/json"
HTML = "text/html"
OCTETS = "application/octet-stream"
LONGEST_TEXT = 64 * 1024  # characters of a message that are shown at once


class PageRequest(NamedTuple):
    """A request that has been admitted."""

    pool: RunPool
    parts: Mapping[str, str]  # of the address
    query: Mapping[str, str]
    fragment: bool = False  # htmx asks for a part of the page
    form_token: str = ""  # of the forms that control a run; empty: the view only reads

    @property
    def run(self) -> str:
        return self.parts["run"]

    @property
    def controls(self) -> bool:
        """Whether the page has buttons: this view may control the run, and the run is running."""
        return bool(self.form_token) and self.pool.is_controllable(self.run)

    def read_part(self, name: str) -> int:
        """Return a whole number of the address."""
        text = self.parts[name]
        if not text.isdecimal() or len(text) > 18:
            raise BadInput(f"no such {name}: `{text[:100]}`")
        return int(text)

    def read_number(self, name: str, default: int = 0) -> int:
        """Return a whole number of the query."""
        text = self.query.get(name, "")
        if not text:
            return default
        if not text.removeprefix("-").isdecimal() or len(text) > 18:
            raise BadInput(f"`{name}` must be a whole number: `{text[:100]}`")
        return int(text)

    def change(self, **parameters: object) -> str:
        """Return the query with some parameters replaced, or removed by None."""
        changed = {**self.query, **parameters}
        kept = {name: str(value) for name, value in changed.items() if value is not None and value != ""}
        return "?" + urlencode(kept)


class PageResponse(NamedTuple):
    """A rendered page."""

    body: bytes
    kind: str = HTML
    status: int = 200
    charset: str | None = "utf-8"
    file: Path | None = None  # sent in place of the body, as a download
    location: str = ""  # the address to go to instead
    pieces: Iterator[bytes] | None = None  # sent in place of the body, one in memory at a time
    name: str = ""  # of the download

    def begin(self) -> PageResponse:
        """Read the first piece, so that an error shows before anything is sent."""
        if self.pieces is None:
            return self
        return self._replace(pieces=chain([next(self.pieces, b"")], self.pieces))

    def read(self) -> Iterator[bytes]:
        """Yield the content of a response that is no file."""
        yield self.body
        yield from self.pieces or ()


def render_page(template: str, **values: Any) -> PageResponse:
    return PageResponse(load_templates().get_template(template).render(values).encode("utf-8", "replace"))


def render_data(value: Any) -> PageResponse:
    return PageResponse(msgspec.json.encode(value), JSON)


def render_error(status: int, message: str, hint: str = "") -> PageResponse:
    page = render_page("error.html", message=message, hint=hint, status=status)
    return page._replace(status=status)


@cache
def load_templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("holdwater.viewer"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    templates.filters.update(
        size=formatting.size,
        count=formatting.count,
        duration=formatting.duration,
        outcome=formatting.outcome_name,
        spec=formatting.short_spec,
        cost=formatting.cost,
        tokens=formatting.token_counts,
        clean=clean_text,
        moment=format_moment,
        part=quote_part,
        cuts=split_cuts,
        ranked=rank_outcomes,
    )
    return templates


def clean_text(text: str) -> str:
    """Return text of an agent without control characters and marks that reorder the text around them."""
    return _SPECIAL.sub(_clean_special, formatting.COLOURS.sub("", text))


def _clean_special(match: re.Match[str]) -> str:
    return match[0] if match[0].isprintable() else "\N{REPLACEMENT CHARACTER}"


_SPECIAL = re.compile(r"[^ -~\n\t]")


def format_moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def rank_outcomes(outcomes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the counts of outcomes: passed, failed, then the failures by frequency."""
    first = {"passed": 0, "failed": 1}
    return sorted(outcomes.items(), key=lambda item: (first.get(item[0], 2), -item[1], item[0]))


def quote_part(text: str) -> str:
    """Quote a name as one part of an address."""
    return quote(text, safe="")
