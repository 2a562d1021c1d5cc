"""Reads the results of an image build from its ledger: a row for each image, the totals and the manifest.

It streams: memory does not grow with the number of images. It writes nothing but the manifest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..core.errors import BadInput
from ..core.image import ImageOutcome, ImageRecipe, PublishedImage
from ..core.records import Record
from ..core.summary import RunSummary
from .durable_files import NEW_SUFFIX, cannot_write, open_private, sync_directory
from .reader import LedgerReader
from .rows import OutcomeRow

MANIFEST = "images.json"
FAILED = "failed"
MOST_SLOWEST = 5
MOST_FAILURES = 50  # failures listed in a report; the manifest lists all


class ImageRow(Record, frozen=True):
    """The result of one image."""

    name: str
    outcome: str  # `made`, `present` or `failed`
    attempts: int
    seconds: float
    failure: str = ""
    where: str = ""
    made: PublishedImage | None = None


class SlowImage(Record, frozen=True):
    name: str
    seconds: float


class FailedImage(Record, frozen=True):
    name: str
    where: str
    message: str


class BuildReport(Record, frozen=True):
    """The summary of a build."""

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
    peak_disk: int  # most bytes that the build added to the daemon's disk; 0: no disk was used
    disk_limit: int  # the disk budget in bytes; 0: none
    slowest: tuple[SlowImage, ...] = ()
    failures: tuple[FailedImage, ...] = ()
    events: dict[str, int] = msgspec.field(default_factory=dict)


def require_recipe(reader: LedgerReader) -> ImageRecipe:
    if reader.config.recipe is None:
        raise BadInput(f"the run is not an image build: `{reader.directory.path}`")
    return reader.config.recipe


def read_images(reader: LedgerReader) -> Iterator[ImageRow]:
    """Yield the result of each settled image, in the order of planning."""
    for row in reader.outcomes():
        yield _make_row(row, reader)


def report_build(reader: LedgerReader, summary: RunSummary | None = None) -> BuildReport:
    recipe, summary = require_recipe(reader), summary or reader.summary()
    counts = dict.fromkeys([*ImageOutcome, FAILED], 0)
    sums = dict.fromkeys(("uploaded", "downloaded", "mounted"), 0)
    slowest: list[tuple[float, int, str]] = []  # a heap of at most MOST_SLOWEST
    failures: list[FailedImage] = []
    for number, row in enumerate(read_images(reader)):
        counts[row.outcome] += 1
        for name in sums:
            sums[name] += getattr(row.made, name) if row.made else 0
        heapq.heappush(slowest, (row.seconds, -number, row.name))
        if len(slowest) > MOST_SLOWEST:
            heapq.heappop(slowest)
        if row.outcome == FAILED and len(failures) < MOST_FAILURES:
            failures.append(FailedImage(name=row.name, where=row.where, message=row.failure))
    gauges = list(reader.gauges())
    return BuildReport(
        run=summary.run,
        directory=summary.directory,
        recipe=recipe.path,
        engine=str(recipe.chosen_engine),
        state=summary.state,
        reason=summary.reason,
        exit_status=summary.exit_status,
        planned=summary.planned,
        total=summary.total,
        made=counts[ImageOutcome.MADE],
        present=counts[ImageOutcome.PRESENT],
        failed=counts[FAILED],
        seconds=summary.seconds,
        peak_disk=max((gauge.disk_used for gauge in gauges), default=0),
        disk_limit=max((gauge.disk_limit for gauge in gauges), default=0),
        slowest=tuple(
            SlowImage(name=name, seconds=seconds) for seconds, _, name in sorted(slowest, reverse=True)
        ),
        failures=tuple(failures),
        events=summary.events,
        **sums,
    )


def write_manifest(reader: LedgerReader) -> Path:
    """Write `images.json`, the report and every image with its own and its base's digest; return its path."""
    path = reader.directory.path / MANIFEST
    new = path.with_name(path.name + NEW_SUFFIX)
    try:
        with open(new, "wb", opener=open_private) as file:
            file.write(b'{"build": ' + msgspec.json.encode(report_build(reader)) + b', "images": [')
            for number, row in enumerate(read_images(reader)):
                file.write((b",\n" if number else b"\n") + msgspec.json.encode(row))
            file.write(b"\n]}\n")
        new.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def _make_row(row: OutcomeRow, reader: LedgerReader) -> ImageRow:
    verdict = reader.verdict(row.attempt)
    made = (
        _image_decoder.decode(verdict.answer) if verdict is not None and verdict.answer is not None else None
    )
    return ImageRow(
        name=row.instance,
        outcome=str(made.how) if made else FAILED,
        attempts=row.attempts,
        seconds=row.times.acting,
        failure=row.failure,
        where=str(row.where or ""),
        made=made,
    )


_image_decoder = msgspec.json.Decoder(PublishedImage)
