"""What a build left in its ledger: a row for each image, the totals, and the manifest that is made of them.

Reads only, and streams: nothing here grows with the number of images but what is printed of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..core.errors import BadInput
from ..core.image import How, Made, Recipe
from ..core.records import Record
from ..core.summary import Summary
from .disk import NEW, cannot_write, sync_directory
from .private import open_private
from .reader import OutcomeRow, Reader

MANIFEST = "images.json"
FAILED = "failed"
MOST_SLOWEST = 5
MOST_FAILURES = 50  # that a report names; the manifest has them all


class ImageRow(Record, frozen=True):
    """What became of one image."""

    name: str
    outcome: str  # `made`, `present` or `failed`
    attempts: int
    seconds: float
    failure: str = ""
    where: str = ""
    made: Made | None = None


class Slow(Record, frozen=True):
    name: str
    seconds: float


class Failed(Record, frozen=True):
    name: str
    where: str
    message: str


class BuildReport(Record, frozen=True):
    """A build in a page."""

    run: str
    directory: str
    recipe: str
    engine: str
    state: str
    reason: str
    exit_status: int | None
    planned: int
    total: int | None
    made: int
    present: int
    failed: int
    seconds: float
    uploaded: int
    downloaded: int
    mounted: int
    peak_disk: int  # bytes on the daemon's disk beyond what was there; 0: none was used
    disk_limit: int  # the budget; 0: none
    slowest: tuple[Slow, ...] = ()
    failures: tuple[Failed, ...] = ()
    events: dict[str, int] = msgspec.field(default_factory=dict)


def recipe_of(reader: Reader) -> Recipe:
    if reader.config.recipe is None:
        raise BadInput(f"the run is no build of images: `{reader.directory.path}`")
    return reader.config.recipe


def images(reader: Reader) -> Iterator[ImageRow]:
    """What became of each image that is settled, in the order of planning."""
    for row in reader.outcomes():
        yield _row(row, reader)


def report(reader: Reader, summary: Summary | None = None) -> BuildReport:
    recipe, summary = recipe_of(reader), summary or reader.summary()
    counts = dict.fromkeys([*How, FAILED], 0)
    sums = dict.fromkeys(("uploaded", "downloaded", "mounted"), 0)
    slowest: list[tuple[float, int, str]] = []  # a heap of at most MOST_SLOWEST
    failures: list[Failed] = []
    for number, row in enumerate(images(reader)):
        counts[row.outcome] += 1
        for name in sums:
            sums[name] += getattr(row.made, name) if row.made else 0
        heapq.heappush(slowest, (row.seconds, -number, row.name))
        if len(slowest) > MOST_SLOWEST:
            heapq.heappop(slowest)
        if row.outcome == FAILED and len(failures) < MOST_FAILURES:
            failures.append(Failed(name=row.name, where=row.where, message=row.failure))
    gauges = list(reader.gauges())
    return BuildReport(
        run=summary.run,
        directory=summary.directory,
        recipe=recipe.path,
        engine=str(recipe.chosen),
        state=summary.state,
        reason=summary.reason,
        exit_status=summary.exit_status,
        planned=summary.planned,
        total=summary.total,
        made=counts[How.MADE],
        present=counts[How.PRESENT],
        failed=counts[FAILED],
        seconds=summary.seconds,
        peak_disk=max((gauge.disk_used for gauge in gauges), default=0),
        disk_limit=max((gauge.disk_limit for gauge in gauges), default=0),
        slowest=tuple(Slow(name=name, seconds=seconds) for seconds, _, name in sorted(slowest, reverse=True)),
        failures=tuple(failures),
        events=summary.events,
        **sums,
    )


def write_manifest(reader: Reader) -> Path:
    """Write the build's `images.json`: the report, and every image with its base's digest and its own."""
    path = reader.directory.path / MANIFEST
    new = path.with_name(path.name + NEW)
    try:
        with open(new, "wb", opener=open_private) as file:
            file.write(b'{"build": ' + msgspec.json.encode(report(reader)) + b', "images": [')
            for number, row in enumerate(images(reader)):
                file.write((b",\n" if number else b"\n") + msgspec.json.encode(row))
            file.write(b"\n]}\n")
        new.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def _row(row: OutcomeRow, reader: Reader) -> ImageRow:
    verdict = reader.verdict(row.attempt)
    made = _made.decode(verdict.answer) if verdict is not None and verdict.answer is not None else None
    return ImageRow(
        name=row.instance,
        outcome=str(made.how) if made else FAILED,
        attempts=row.attempts,
        seconds=row.times.acting,
        failure=row.failure,
        where=str(row.where or ""),
        made=made,
    )


_made = msgspec.json.Decoder(Made)
