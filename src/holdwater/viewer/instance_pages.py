"""The table of instances, and one instance with its attempts, their logs and their files."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from ..core.errors import BadInput
from ..core.failures import RULES, RetryRule
from ..core.records import Verdict
from ..ledger.attempt_files import attempt_files, patch_path, salvage_path, taken_out_path
from ..ledger.directory import RunDirectory
from ..ledger.listing import SORTS, ListedSample, SampleFilter, SampleList, list_places, list_tags
from ..ledger.reader import LedgerReader
from ..ledger.rows import AttemptRow, EventRow
from .page import LONGEST_TEXT, PageRequest, PageResponse, render_page

PAGE_SIZE = 50
MOST_ATTEMPTS = 50
MOST_EVENTS = 20
FILTERS = ("kind", "place", "failure", "name", "text", "tag")


def show_instances(asked: PageRequest) -> PageResponse:
    wanted = read_filter(asked)
    with asked.pool.open(asked.run) as reader:
        samples = SampleList(reader, wanted)
        before, after = asked.query.get("before", ""), asked.query.get("after", "")
        rows = samples.read_page(PAGE_SIZE + 1, before or after, backwards=bool(before))
        more = len(rows) > PAGE_SIZE
        rows = rows[-PAGE_SIZE:] if before else rows[:PAGE_SIZE]
        found = samples.count()
        kinds = reader.counts().outcomes
        several = reader.config.samples > 1
        places, tags = list_places(reader), list_tags(reader)
    values = {
        "rows": rows,
        "more": more,
        "found": found,
        "kinds": kinds,
        "several": several,
        "places": places,
        "tags": tags,
    }
    template = "instance_rows.html" if asked.fragment else "instances.html"
    return render_page(template, asked=asked, run=asked.run, wanted=wanted, sorts=SORTS, **values)


def read_filter(asked: PageRequest) -> SampleFilter:
    texts = {name: asked.query.get(name, "") for name in FILTERS}
    return SampleFilter(
        **texts, sort=asked.query.get("sort", "planned"), descending=asked.query.get("order") == "down"
    )


class KeptEntry(NamedTuple):
    """A file of an attempt."""

    name: str
    size: int
    is_log: bool


class PatchedFile(NamedTuple):
    """The changes of one file in a patch."""

    name: str
    lines: list[tuple[str, str]]  # each with the kind of the change

    @property
    def added(self) -> int:
        return sum(kind == "added" for kind, _ in self.lines)

    @property
    def removed(self) -> int:
        return sum(kind == "removed" for kind, _ in self.lines)


class ShownAttempt(NamedTuple):
    """An attempt on the page of its instance."""

    row: AttemptRow
    verdict: Verdict | None  # of kept work, with the usage of the attempt in which the agent acted
    events: list[EventRow]
    reason: str  # why it was made
    patch: list[PatchedFile]
    patch_cut: bool
    files: list[KeptEntry]
    salvaged: bool


def show_instance(asked: PageRequest) -> PageResponse:
    name, sample = asked.parts["instance"], asked.read_number("sample")
    with asked.pool.open(asked.run) as reader:
        instance = reader.find_instance(name)
        if instance is None:
            raise BadInput(f"no such instance in the run: `{name[:200]}`")
        samples = SampleList(reader, read_filter(asked))
        row = samples.find(instance.id, sample)
        rows = [found for found in reader.attempts(instance.id) if found.sample == sample][-MOST_ATTEMPTS:]
        values: dict[str, Any] = {
            "instance": instance,
            "row": row,
            "attempts": [
                _read_attempt(reader, found, before) for before, found in pairwise([None, *rows]) if found
            ],
            "samples": reader.config.samples,
            "previous": _find_neighbour(samples, row, backwards=True),
            "following": _find_neighbour(samples, row, backwards=False),
        }
    return render_page("instance.html", asked=asked, run=asked.run, sample=sample, **values)


def _find_neighbour(samples: SampleList, row: ListedSample | None, *, backwards: bool) -> ListedSample | None:
    """Return the row before or after this one in the filtered list."""
    if row is None:
        return None
    found = samples.read_page(1, row.cursor, backwards=backwards)
    return found[0] if found else None


def _read_attempt(reader: LedgerReader, row: AttemptRow, before: AttemptRow | None) -> ShownAttempt:
    patch = _read_patch(reader.directory, row.attempt)
    work = (salvage_path, taken_out_path)
    return ShownAttempt(
        row=row,
        verdict=reader.whole_verdict(row.attempt) if row.verdict is not None else None,
        events=reader.events(last=MOST_EVENTS, attempt=row.attempt),
        reason=explain_attempt(row, before) if before is not None else "",
        patch=list(split_patch(patch)),
        patch_cut=len(patch) >= LONGEST_TEXT,
        files=list(_list_entries(reader.directory, row)),
        salvaged=any(path(reader.directory, row.attempt).exists() for path in work),
    )


def explain_attempt(row: AttemptRow, before: AttemptRow) -> str:
    """Return why an attempt followed another one at the same sample."""
    failure = before.verdict.failure if before.verdict is not None else None
    if failure is None:
        graded = before.kind if before.kind in ("passed", "failed") else "not settled"
        reason = f"attempt {before.number} {graded}"
    else:
        reason = f"attempt {before.number} ended with {failure.where}: {failure.kind}"
    if row.regrades:
        return f"{reason}; its work is graded again, without the agent"
    if row.round > before.round:
        return f"{reason}; round {row.round} of `--attempts`"
    rule = RULES[failure.where] if failure is not None else None
    allowed = (
        f", allowed by `{rule.again}`"
        if rule and rule.again in (RetryRule.ATTEMPTS, RetryRule.RETRIES)
        else ""
    )
    grown = f", with {row.scale} x the resources" if row.scale > before.scale else ""
    alone = ", alone in its worker" if row.alone and not before.alone else ""
    return f"{reason}; tried again{allowed}{grown}{alone}"


def _read_patch(directory: RunDirectory, attempt: int) -> str:
    try:
        with patch_path(directory, attempt).open("rb") as file:
            return file.read(LONGEST_TEXT).decode("utf-8", "replace")
    except OSError:
        return ""


def split_patch(text: str) -> Iterator[PatchedFile]:
    """Yield the files of a unified diff, each with its lines and their kinds."""
    kinds = {"+": "added", "-": "removed", "@": "place"}
    lines: list[tuple[str, str]] = []
    name, in_hunk = "", False
    for line in text.splitlines():
        if line.startswith("diff "):
            if lines:
                yield PatchedFile(name, lines)
            name, lines, in_hunk = line.rpartition(" b/")[2] or line, [], False
        in_hunk = in_hunk or line.startswith("@@")
        heading = line.startswith(("diff ", "index ", "--- ", "+++ ")) and not in_hunk
        lines.append(("file" if heading else kinds.get(line[:1], ""), line))
    if lines:
        yield PatchedFile(name or "patch", lines)


def _list_entries(directory: RunDirectory, row: AttemptRow) -> Iterator[KeptEntry]:
    for path in attempt_files(directory, row.attempt, row.instance):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            yield KeptEntry(path.name, status.st_size, path.parent == directory.logs)
