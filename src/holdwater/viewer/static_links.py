"""The pages of a static export: which addresses it has, the file of each, and links from file to file.

Every address is brought to one form, so that all links to a page name the same file. A link to a page that
is not exported loses its address. `export.py` renders the pages.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from blake3 import blake3

from ..core.errors import BadInput
from ..core.records import Record
from ..ledger.attempt_files import slug
from ..ledger.listing import OPEN, SampleFilter, SampleList
from .file_pages import find_attempt_row
from .instance_pages import PAGE_SIZE
from .page import PageRequest, quote_part
from .routes import PAGES
from .run_pool import RunPool
from .transcript_pages import WINDOW, find_place, list_window

INSTANCE = "/runs/{run}/instances/{instance}"
INSTANCES = "/runs/{run}/instances"
TRANSCRIPT = "/runs/{run}/attempts/{attempt}/transcript"
TURNS = "/runs/{run}/attempts/{attempt}/turns"
FILE = "/runs/{run}/attempts/{attempt}/file"
TEXT = "/runs/{run}/attempts/{attempt}/text"
BLOB = "/runs/{run}/blobs/{blob}"
COMPARE = "/compare"
# The pages of an export, with the parameters that make a page of their own. A link without the others, which
# sort or search, leads to the same page.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "/": (),
    COMPARE: ("a", "b"),
    "/compare/instance": ("a", "b", "instance", "sample"),
    "/runs/{run}": (),
    "/runs/{run}/branches": ("instance",),
    "/runs/{run}/rollouts": ("below",),
    "/runs/{run}/orders/{order}": (),
    INSTANCES: ("kind", "failure", "after"),
    INSTANCE: ("sample",),
    "/runs/{run}/attempts/{attempt}/log": ("name",),
    FILE: ("name",),
    TEXT: ("turn", "of", "as"),
    TRANSCRIPT: ("thread", "from"),
    BLOB: ("type",),
}
INSIDE = (INSTANCE, TRANSCRIPT, "/runs/{run}/attempts/{attempt}/log", BLOB)  # of the file of one instance
DEFAULTS = {("sample", "0"), ("thread", "0"), ("from", "0")}
ROUTES = {route: re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", route)) for route in PAGES}


class ExportSelection(Record, frozen=True):
    """Selects the instances whose pages are exported; lists have all of them."""

    only: tuple[str, ...] = ()  # patterns of names
    failed: bool = False  # only samples that did not pass

    def takes(self, name: str, kind: str) -> bool:
        named = not self.only or any(fnmatchcase(name, pattern) for pattern in self.only)
        return named and not (self.failed and kind == "passed")


class StaticPage(NamedTuple):
    """A page of an export."""

    route: str
    parts: Mapping[str, str]
    query: Mapping[str, str]

    @property
    def address(self) -> str:
        path = re.sub(r"\{(\w+)\}", lambda name: quote_part(self.parts[name[1]]), self.route)
        return path + ("?" + urlencode(self.query) if self.query else "")

    @property
    def key(self) -> str:
        """A short name, the same for every link to the page."""
        return blake3(repr((self.route, *self.parts.items(), *self.query.items())).encode()).hexdigest()[:10]

    @property
    def file(self) -> str:
        """The path of its file below the directory of the export."""
        if self.route == "/":
            return "index.html"
        if self.route == FILE:
            return f"runs/{self.parts['run']}/files/{self.query['name']}"
        if self.route == TEXT:
            return (
                f"runs/{self.parts['run']}/texts/{self.parts['attempt']}-{self.query['turn']}-{self.key}.txt"
            )
        if self.route == BLOB:
            return f"runs/{self.parts['run']}/blobs/{self.parts['blob']}{find_suffix(self.query)}"
        *folders, last = (self.parts.get(part[1:-1], part) for part in self.route.strip("/").split("/"))
        words = "-".join((last, *(word for item in self.query.items() for word in item)))
        name = slug(words)
        plain = name == words and name == name.lower()  # some file systems do not tell `A` from `a`
        return "/".join((*folders, f"{name}.html" if plain else f"{name}-{self.key}.html"))

    def request(self, pool: RunPool, *, fragment: bool = False) -> PageRequest:
        return PageRequest(pool, self.parts, self.query, fragment)


def find_suffix(query: Mapping[str, str]) -> str:
    kind, _, suffix = query.get("type", "").partition("/")
    return f".{suffix}" if kind == "image" and suffix.isalnum() else ""


class StaticLinks:
    """Finds the page behind a link, if the export has it."""

    def __init__(
        self, pool: RunPool, runs: Sequence[str], wanted: ExportSelection, single: StaticPage | None = None
    ) -> None:
        self._pool = pool
        self._runs = runs
        self._wanted = wanted
        self._single = single  # the instance whose pages are sections of one file
        self.resolve: Callable[[str], StaticPage | None] = lru_cache(4096)(self._resolve)
        self._takes: Callable[[str, str, int], bool] = lru_cache(4096)(self._check_sample)
        self._list_turns: Callable[[str, str, str, int], list[int]] = lru_cache(4096)(self._read_turns)
        self._find_sample: Callable[[str, int], tuple[str, int]] = lru_cache(4096)(self._read_sample)

    def _resolve(self, address: str) -> StaticPage | None:
        """Return the page at an address in its one form; None if the export does not have it."""
        page = find_page(address)
        try:
            return None if page is None else self._admit(page)
        except BadInput:  # a link that leads to nothing
            return None

    def _admit(self, page: StaticPage) -> StaticPage | None:
        if page.route == COMPARE:
            if len(self._runs) != 2:
                return None
            page = page._replace(query=dict(zip("ab", self._runs, strict=True)))
        if page.route == TURNS:
            page = page._replace(route=TRANSCRIPT)
        named = [page.parts.get("run"), page.query.get("a"), page.query.get("b")]
        known = page.route in PARAMETERS and "/" not in page.query.get("name", "")
        if not known or any(run not in self._runs for run in named if run is not None) or not self._has(page):
            return None
        query = dict(page.query)
        if page.route == INSTANCES and "before" in query:
            query["after"] = self._find_after(page)
        if page.route == TRANSCRIPT:
            query["from"] = "" if self._single else self._find_window(page)
        if page.route == TEXT:
            query["as"] = "file"  # as it was sent, whether it is shown or downloaded
        kept = {name: query[name] for name in PARAMETERS[page.route] if query.get(name)}
        return page._replace(query={item[0]: item[1] for item in kept.items() if item not in DEFAULTS})

    def _has(self, page: StaticPage) -> bool:
        """Return whether the export has the instance of the page."""
        if self._single is not None and page.route not in INSIDE:
            return False
        request = page.request(self._pool)
        if "attempt" in page.parts:
            name, sample = self._find_sample(request.run, request.read_part("attempt"))
        elif page.route == INSTANCE:
            name, sample = page.parts["instance"], request.read_number("sample")
        elif page.route == "/compare/instance":
            return self._takes(page.query["b"], page.query.get("instance", ""), request.read_number("sample"))
        else:
            return True
        if self._single is not None and name != self._single.parts["instance"]:
            return False
        return self._takes(request.run, name, sample)

    def _check_sample(self, run: str, name: str, sample: int) -> bool:
        with self._pool.open(run) as reader:
            instance = reader.find_instance(name)
            row = instance and SampleList(reader, SampleFilter()).find(instance.id, sample)
        return instance is not None and self._wanted.takes(name, row.kind if row else OPEN)

    def _read_sample(self, run: str, attempt: int) -> tuple[str, int]:
        with self._pool.open(run) as reader:
            row = find_attempt_row(reader, attempt)
            return row.instance, row.sample

    def _find_after(self, page: StaticPage) -> str:
        """Return the row after which the page begins that ends before another row."""
        wanted = SampleFilter(kind=page.query.get("kind", ""), failure=page.query.get("failure", ""))
        with self._pool.open(page.parts["run"]) as reader:
            rows = SampleList(reader, wanted).read_page(PAGE_SIZE + 1, page.query["before"], backwards=True)
        return rows[0].cursor if len(rows) > PAGE_SIZE else ""

    def _find_window(self, page: StaticPage) -> str:
        """Return the place in the thread at which a window with the turn of a link begins."""
        request = page.request(self._pool)
        if not page.query.get("turn"):
            return str(request.read_number("from"))
        place, turn = find_place(request), request.read_number("turn")
        start = place // WINDOW * WINDOW
        shown = self._list_turns(request.run, page.parts["attempt"], page.query.get("thread", "0"), start)
        return str(start if turn in shown else place)  # a window of large turns is shorter

    def _read_turns(self, run: str, attempt: str, thread: str, start: int) -> list[int]:
        query = {"thread": thread, "from": str(start)}
        return list_window(PageRequest(self._pool, {"run": run, "attempt": attempt}, query))


def find_page(address: str) -> StaticPage | None:
    """Return the page at an address of the view."""
    asked = urlsplit(address)
    for route, pattern in ROUTES.items():
        match = pattern.fullmatch(asked.path)
        if match:
            parts = {name: unquote(part) for name, part in match.groupdict().items()}
            return StaticPage(route, parts, dict(parse_qsl(asked.query)))
    return None


def link_file(page: StaticPage, file: str) -> str:
    """Return the address of a file of the export relative to a page."""
    return posixpath.relpath(file, posixpath.dirname(page.file) or ".")
