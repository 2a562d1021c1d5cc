"""Writes the view of runs as files that need no server: a directory of pages, or one instance as one file.

The pages and their templates are those of the server. Here alone their links become links between files,
and parts that a browser would load afterwards become parts of the page. `static_links.py` has the addresses.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urljoin, urlsplit

import msgspec

from ..core.errors import BadInput
from ..core.records import Record
from ..ledger.durable_files import open_atomic_directory, open_atomic_file, write_json
from ..ledger.listing import list_lengths
from .file_pages import open_entry
from .instance_pages import PAGE_SIZE
from .page import JSON, PageResponse
from .routes import show_page
from .run_pool import RunPool
from .static import NAMES, STATIC
from .static_links import (
    BLOB,
    FILE,
    INSTANCE,
    TEXT,
    ExportSelection,
    StaticLinks,
    StaticPage,
    find_page,
    link_file,
)
from .transcript_pages import IMAGES, WINDOW

MARKER = "holdwater-export.json"  # says that a directory is an export, which `--force` may replace
SCRIPTS, STYLES = ("uplot.min.js", "view.js"), ("uplot.min.css", "view.css")  # of one file
COPIED = tuple(name for name in NAMES if name not in ("htmx.min.js", "work.js"))  # these need a server
MOST_PROBLEMS = 20
BESIDE = "script-src 'self'; style-src 'self'; img-src 'self'"  # the files of a directory
HEAD = '<meta charset="utf-8">'
# A part that the browser asks for: at once, or when it is scrolled to. The latter contains a link to itself.
FRAGMENT = re.compile(
    r'<div hx-get="([^"]*)" hx-trigger="(load|revealed|unfold)[^"]*"[^>]*>(.*?)</div>', re.DOTALL
)
TAG = re.compile(r'<[a-z]+\b[^>]* (?:href|src|hx-get|action|data-timeline|data-charts|data-live|id)="[^>]*>')
ATTRIBUTE = re.compile(
    r' (href|src|hx-get|action|data-timeline|data-charts|data-moment|data-live|id)="([^"]*)"'
)
NEIGHBOURS = ("data-next", "data-previous")  # links that the lists have as well


class ExportReport(Record, frozen=True):
    """The result of an export."""

    path: str
    pages: int
    files: int  # images and files of attempts
    bytes: int
    problems: tuple[str, ...]  # of pages that say why they cannot be shown, at most MOST_PROBLEMS


class StaticRenderer:
    """Renders pages that need no server, and collects the pages that they lead to."""

    def __init__(self, pool: RunPool, links: StaticLinks, *, single: bool = False) -> None:
        self.found: list[StaticPage] = []  # bound: the links of one page; the caller empties it
        self.problems: list[str] = []  # bound: MOST_PROBLEMS
        self._pool = pool
        self._links = links
        self._single = single  # pages are sections of one file

    def render(self, page: StaticPage) -> Iterator[str]:
        """Yield a page in pieces, with all its parts, and with links to files."""
        waiting = [self._split(page)]
        while waiting:
            piece = next(waiting[-1], None)
            if piece is None:
                waiting.pop()
            elif isinstance(piece, StaticPage):
                waiting.append(self._split(piece, fragment=True))
            else:
                ids = set(re.findall(r' id="([^"]*)"', piece))
                yield TAG.sub(lambda tag, ids=ids: self._rewrite_tag(page, tag[0], ids), piece)  # type: ignore[misc]

    def read(self, page: StaticPage, *, fragment: bool = False) -> PageResponse:
        """Return a page as the server sends it; remember the problem if it is about an error."""
        response = show_page(page.route, page.request(self._pool, fragment=fragment))
        if response.status != 200 and len(self.problems) < MOST_PROBLEMS:
            title = re.search(r"<title>(.*?)</title>", response.body.decode(), re.DOTALL)
            self.problems.append(f"{page.address}: {html.unescape(title[1]) if title else ''}")
        return response

    def _split(self, page: StaticPage, *, fragment: bool = False) -> Iterator[str | StaticPage]:
        """Yield the text of a page and, in their places, its parts."""
        text, *rest = FRAGMENT.split(self.read(page, fragment=fragment).body.decode())
        yield text
        for address, trigger, inside, after in zip(*[iter(rest)] * 4, strict=True):
            part = find_page(html.unescape(address))
            yield part if part is not None and (trigger != "revealed" or self._single) else inside
            yield after

    def _rewrite_tag(self, page: StaticPage, tag: str, ids: set[str]) -> str:
        before = len(self.found)
        new = ATTRIBUTE.sub(lambda found: self._rewrite_attribute(page, found, ids), tag)
        if any(name in tag for name in NEIGHBOURS):
            del self.found[before:]
        chart = re.search(r' data-(?:timeline|charts)="([^"]*)"', tag)
        return new + self._inline_data(html.unescape(chart[1])) if chart else new

    def _rewrite_attribute(self, page: StaticPage, attribute: re.Match[str], ids: set[str]) -> str:
        name, value = attribute[1], html.unescape(attribute[2])
        if name == "id":
            return f' id="{html.escape(self._name_place(page, value))}"'
        link = self._link(page, value, ids) if name in ("href", "src") else ""  # others need a server
        return f' {name}="{html.escape(link)}"' if link else ""

    def _link(self, page: StaticPage, value: str, ids: set[str]) -> str:
        """Return what a link says in the export; nothing if it leads out of it."""
        parts = urlsplit(urljoin(page.address, value))
        if parts.path.startswith("/static/"):
            known = parts.path.removeprefix("/static/") in COPIED and not self._single
            return link_file(page, parts.path[1:]) if known else ""
        if parts.fragment in ids and parts.path == urlsplit(page.address).path:
            return f"#{self._name_place(page, parts.fragment)}"
        target = self._links.resolve(parts.geturl())
        if target is None:
            return ""
        if self._single and target.route == BLOB:
            return make_data_address(self.read(target))
        if target.address == page.address and not parts.fragment:
            return ""  # the parameters that would make it another page are not exported
        self.found.append(target)
        place = f"#{self._name_place(target, parts.fragment)}" if parts.fragment else ""
        return (place or f"#{target.key}") if self._single else link_file(page, target.file) + place

    def _name_place(self, page: StaticPage, name: str) -> str:
        """Return the id of a place; turns of several attempts have the same numbers."""
        return f"{page.key}-{name}" if self._single and name[-1:].isdigit() else name

    def _inline_data(self, address: str) -> str:
        page = find_page(address)
        data = self.read(page).body.decode().replace("<", r"\u003c") if page is not None else "null"
        return f'<script type="{JSON}">{data}</script>'


def export_runs(
    pool: RunPool, out: Path, wanted: ExportSelection, tell: Callable[[str], None], *, force: bool = False
) -> ExportReport:
    """Write the pages of all runs of a pool to a directory, which appears when it is complete."""
    check_place(out, force=force)
    runs = [run.id for run in pool.list_runs()]
    total = estimate_pages(pool, runs, wanted)
    with open_atomic_directory(out.resolve()) as new:
        report = write_directory(StaticRenderer(pool, StaticLinks(pool, runs, wanted)), new, total, tell)
        report = msgspec.structs.replace(report, path=str(out))
        write_json(new / MARKER, report)
    return report


def check_place(out: Path, *, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise BadInput(f"not a directory: `{out}`", "only `--instance NAME` writes a file")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not (out / MARKER).is_file():
        raise BadInput(f"the directory is not empty and holds no export: `{out}`", "give another directory")
    if not force:
        raise BadInput(f"the directory holds an export already: `{out}`", "`--force` replaces it")


def estimate_pages(pool: RunPool, runs: Sequence[str], wanted: ExportSelection) -> int:
    """Return about how many pages an export has; raise BadInput if it has no instance."""
    if not runs:
        raise BadInput(f"no run below `{'`, `'.join(map(str, pool.roots))}`")
    pages, chosen = 1.0, 0
    for run in runs:
        pages += 3
        with pool.open(run) as reader:
            for name, kind, turns in list_lengths(reader):
                pages += 2 / PAGE_SIZE  # in the list of all, and in that of its outcome
                if wanted.takes(name, kind):
                    chosen += 1
                    pages += 2 + turns // WINDOW
    if not chosen and (wanted.only or wanted.failed):
        raise BadInput("no instance is chosen by `--only` and `--failed`")
    return round(pages)


def write_directory(
    renderer: StaticRenderer, place: Path, total: int, tell: Callable[[str], None]
) -> ExportReport:
    """Write all pages that the list of runs leads to; a file that exists has been written already."""
    pages = files = size = 0
    for name in COPIED:
        size += write_response(place / "static" / name, PageResponse(STATIC[name].read_bytes()))
    waiting = [StaticPage("/", {}, {})]  # bound: the links of the current page and of the lists above it
    while waiting:
        page = waiting.pop()
        path = place / page.file
        if path.exists():
            continue
        if page.route in (FILE, BLOB, TEXT):
            files += 1
            size += write_response(path, renderer.read(page))
        else:
            pages += 1
            size += write_page(path, page, renderer)
            waiting.extend(reversed(renderer.found))
            renderer.found.clear()
        tell(f"{pages:,} of about {total:,} pages and {files:,} files, {size / 2**20:,.0f} MiB")
    return ExportReport("", pages, files, size, tuple(renderer.problems))


def write_page(path: Path, page: StaticPage, renderer: StaticRenderer) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for piece in renderer.render(page):
            file.write(mark_static(piece, BESIDE).encode("utf-8", "replace"))
        return file.tell()


def write_response(path: Path, response: PageResponse) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for piece in response.read():
            file.write(piece)
        if response.file is not None:
            with open_entry(response.file) as source:
                shutil.copyfileobj(source, file)
        return file.tell()


def mark_static(piece: str, sources: str) -> str:
    """Return the beginning of a page with a policy and a mark for the style; other pieces as they are."""
    if HEAD not in piece:
        return piece
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    meta = f'{HEAD}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return piece.replace(HEAD, meta, 1).replace("<html ", '<html class="static" ', 1)


# One instance as one file: its pages are sections, one below the other.


def export_instance(pool: RunPool, name: str, out: Path, tell: Callable[[str], None]) -> ExportReport:
    """Write one instance with its conversations as one file, which appears when it is complete."""
    runs = [run.id for run in pool.list_runs()]
    if len(runs) != 1:
        raise BadInput(f"`--instance` takes one run, and there are {len(runs)}", "name the run's directory")
    if out.is_dir():
        raise BadInput(f"a directory: `{out}`", "with `--instance`, `--export` names a file")
    start = StaticPage(INSTANCE, {"run": runs[0], "instance": name}, {})
    with pool.open(runs[0]) as reader:
        if reader.find_instance(name) is None:
            raise BadInput(f"no such instance in the run: `{name[:200]}`")
    renderer = StaticRenderer(pool, StaticLinks(pool, runs, ExportSelection(), start), single=True)
    with open_atomic_file(out) as file:
        pages = write_sections(renderer, start, file, tell)
        size = file.tell()
    return ExportReport(str(out), pages, 0, size, tuple(renderer.problems))


def write_sections(
    renderer: StaticRenderer, start: StaticPage, out: BinaryIO, tell: Callable[[str], None]
) -> int:
    """Write the pages of an instance below each other; return their number."""
    waiting, written = [start], set[str]()  # bound: the pages of one instance
    tail = ""
    while waiting:
        page = waiting.pop()
        if page.key in written:
            continue
        for piece in renderer.render(page):
            head, opened, body = piece.rpartition("<body>")
            if opened:
                body = f'<section class="page" id="{page.key}">{body}'
                out.write(("" if written else f"{embed_files(head)}<body>").encode())
            body, closed, rest = body.partition("</main>")
            out.write(f"{body}</main></section>\n".encode() if closed else body.encode("utf-8", "replace"))
            tail = rest if closed else tail
            tell(f"{len(written) + 1} pages, {out.tell() / 2**20:,.0f} MiB")
        written.add(page.key)
        waiting.extend(reversed(renderer.found))
        renderer.found.clear()
    out.write(tail.encode())
    return len(written)


def embed_files(head: str) -> str:
    """Return the head of a page with styles and scripts in it, and a policy that allows just these."""
    bare = re.sub(r"<link rel=[^>]*>\n?|<script[^>]*></script>\n?", "", head)
    texts = {"style": [STATIC[name].read_text() for name in STYLES]}
    texts["script"] = [STATIC[name].read_text() for name in SCRIPTS]
    sources = [f"{kind}-src {' '.join(map(hash_source, parts))}" for kind, parts in texts.items()]
    added = "".join(f"<{kind}>{text}</{kind}>\n" for kind, parts in texts.items() for text in parts)
    return mark_static(bare.replace("</head>", f"{added}</head>"), "; ".join((*sources, "img-src data:")))


def hash_source(text: str) -> str:
    """Return the source of a policy that allows this script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def make_data_address(image: PageResponse) -> str:
    """Return an address that contains an image."""
    if image.kind not in IMAGES:
        return ""
    return f"data:{image.kind};base64,{base64.b64encode(b''.join(image.read())).decode()}"
