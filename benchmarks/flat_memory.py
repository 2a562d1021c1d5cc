"""Measures memory, CPU and disk of long runs with four kinds of work; with `--peers` also of other programs.

    python benchmarks/flat_memory.py [--quick] [--json] [--peers] [--rows 1,4] [--keep DIRECTORY]

Memory is PSS, summed over the conductor and its workers; CPU covers the same processes. It asserts nothing.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import content
import msgspec
import peers
import psutil
import table
import work
import zstandard
from gauge import MB, Watch
from launch import HERE, Launched, holdwater, run, run_arguments, size_of, upstream
from table import Row, at_most, say

import holdwater as hw
from holdwater.testing.scripted_model import ScriptedReply, make_turns

IMAGE = 150_000  # bytes
PAGE = 4_000_000  # bytes of text in each turn of a large history
PAGES = 5
SOON = 0.05  # seconds between two samples of a short command
TALK = ("--agent", f"{HERE / 'work.py'}:talk")


class Sizes(msgspec.Struct, frozen=True):
    """The number of instances of each kind of work."""

    talks: int
    images: int
    histories: int


FULL = Sizes(talks=433, images=40, histories=433)
QUICK = Sizes(talks=30, images=2, histories=4)


def main() -> None:
    options = table.options(__doc__ or "")
    sizes = QUICK if options.quick else FULL
    chosen = options.rows.split(",") if options.rows else list(ROWS)
    rows: list[Row] = []
    with directory_of(options.keep) as directory:
        for number in chosen:
            rows += ROWS[number](directory, sizes)
        if options.peers:
            rows += peers.measured(directory, sizes.talks, sizes.images, chosen)
    table.show(rows, json=options.json)


def talks(directory: Path, sizes: Sizes) -> list[Row]:
    """Row 1: many turns of a little text, the agent in the worker."""
    count = sizes.talks
    what = f"{count} x {work.TURNS} turns x 10 KB"
    say(what)
    with upstream(work.TURNS, work.REPLIED) as url:
        ran = run(directory / "talks", directory / "talks.log", TALK, count, url)
    return [
        *_ended(what, ran),
        *_memory(what, ran.watch, 180),
        *_steady(what, ran, count),
        Row(f"{what}: turns a second", round(count * work.TURNS / ran.seconds, 1), "1/s"),
    ]


def images(directory: Path, sizes: Sizes) -> list[Row]:
    """Row 2: an image in each turn, the agent a command."""
    count = sizes.images
    what = f"{count} x {work.TURNS} turns x 150 KB image"
    say(what)
    out = directory / "images"
    with upstream(work.TURNS, work.REPLIED) as url:
        ran = run(out, directory / "images.log", _talker("images", work.TURNS, IMAGE), count, url)
    kept = size_of(out / "exchanges") + size_of(out / "blobs")
    unique = _compressed(count)
    return [
        *_ended(what, ran),
        *_memory(what, ran.watch, 200),
        Row(f"{what}: CPU a turn", round(1000 * ran.watch.cpu / (count * work.TURNS), 2), "ms"),
        Row(f"{what}: disk", round(kept / MB, 1), "MB"),
        at_most(f"{what}: disk / unique compressed bytes", kept / unique, 1.2, ""),
    ]


def histories(directory: Path, sizes: Sizes) -> list[Row]:
    """Row 3: large histories, then everything that reads them."""
    count = sizes.histories
    what = f"{count} histories of {PAGES * PAGE // MB} MB"
    say(what)
    out, log = directory / "histories", directory / "histories.log"
    with upstream(PAGES, work.REPLIED) as url:
        ran = run(out, log, _talker("text", PAGES, PAGE), count, url)
    turns = count * PAGES
    rows = [
        *_ended(what, ran),
        *_memory(f"{what}: run", ran.watch, 300),
        Row(f"{what}: CPU a turn", round(1000 * ran.watch.cpu / turns, 2), "ms"),
        Row(f"{what}: disk", round((size_of(out / "exchanges") + size_of(out / "blobs")) / MB, 1), "MB"),
    ]
    for command in READERS:
        say(f"{what}: {command[0]} {' '.join(command[1:])}")
        ran = holdwater([command[0], str(out), *command[1:]], Path(os.devnull), seconds=SOON)
        name = f"{what}: `{' '.join(command)}`"
        rows += [*_ended(name, ran), at_most(f"{name}: peak", ran.watch.peak.total / MB, 300, "MB")]
    return rows


READERS = (
    ("show", "--json"),
    ("export", "--what", "outcomes"),
    ("export", "--what", "attempts"),
    ("export", "--what", "exchanges"),
    ("audit", "--json"),
)


def resumed(directory: Path, sizes: Sizes) -> list[Row]:
    """Row 4: the first row, killed half-way and resumed."""
    count = sizes.talks
    what = f"{count} x {work.TURNS} turns x 10 KB, kill -9 at half-way and resume"
    say(what)
    out, log = directory / "resumed", directory / "resumed.log"
    with upstream(work.TURNS, work.REPLIED) as url:
        arguments = run_arguments(out, TALK, count, url)
        holdwater(arguments, log, during=lambda pid: _kill_when(out, count // 2, pid))
        settled = hw.show(out).settled
        ran = holdwater(["resume", str(out), "--json", "--quiet"], log)
    again, lost = _run_again(directory, out)
    audit = hw.audit(out)
    return [
        *_ended(what, ran),
        Row(f"{what}: settled when killed", settled),
        at_most(f"{what}: finished attempts run again", again, 0, ""),
        Row(f"{what}: attempts that were running and run again", lost),
        Row(f"{what}: audit", "ok" if audit.ok else "not ok", "", "ok", audit.ok),
        at_most(f"{what}: peak memory of the resume", ran.watch.peak.total / MB, 180, "MB"),
    ]


ROWS: dict[str, Callable[[Path, Sizes], list[Row]]] = {
    "1": talks,
    "2": images,
    "3": histories,
    "4": resumed,
}


def _talker(kind: str, turns: int, size: int) -> tuple[str, ...]:
    words = [sys.executable, str(HERE / "talker.py"), "{id}", "{model_url}", "{model_key}", "{model}"]
    return "--agent", "command", "--command", f"{shlex.join(words)} {kind} {turns} {size}"


def _ended(what: str, ran: Launched) -> list[Row]:
    """Return a row only if the run failed: its figures are invalid then."""
    return [] if ran.status == 0 else [Row(f"{what}: exit status", ran.status, "", "0", False)]


def _memory(what: str, watch: Watch, most: float) -> list[Row]:
    peak = watch.peak
    return [
        at_most(f"{what}: peak memory", peak.total / MB, most, "MB"),
        Row(f"{what}: of it the conductor", round(peak.root / MB, 1), "MB"),
    ]


def _steady(what: str, ran: Launched, count: int) -> list[Row]:
    """Return CPU per turn and the slope. Only a full run has these targets; a short one is mostly startup."""
    cpu = 1000 * ran.watch.cpu / (count * work.TURNS)
    if count < FULL.talks:
        return [Row(f"{what}: CPU a turn, start-up included", round(cpu, 2), "ms")]
    slope = ran.watch.slope().times(100 * ran.seconds / count / MB)
    value = f"{slope.value:+.2f} ± {slope.error:.2f}"
    flat = slope.value <= 2 * slope.error  # no growth beyond two standard errors
    return [
        at_most(f"{what}: CPU a turn", cpu, 3, "ms"),
        Row(f"{what}: slope", value, "MB a 100 instances", "0", flat),
    ]


def _compressed(count: int) -> int:
    """Return the zstd-compressed size of all new content in row 2: each image, and each text once."""
    squeeze = zstandard.ZstdCompressor(level=3).compress
    seeds = [f"talk-{number}/{turn}" for number in range(count) for turn in range(work.TURNS)]
    script = make_turns(work.TURNS, work.REPLIED)
    replies = [script({}, b'"assistant"' * turn) for turn in range(work.TURNS)]
    said = [f"Look at {seed}." for seed in seeds]
    said += [reply.text for reply in replies if isinstance(reply, ScriptedReply)]
    return sum(len(squeeze(content.image(seed, IMAGE))) for seed in seeds) + len(
        squeeze("".join(said).encode())
    )


def _kill_when(directory: Path, settled: int, pid: int) -> None:
    """Kill a conductor's whole process group with -9 once `settled` samples are settled."""
    process = psutil.Process(pid)
    while _settled(directory) < settled and process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.2)
    os.killpg(pid, signal.SIGKILL)


def _settled(directory: Path) -> int:
    try:
        return hw.show(directory).settled
    except hw.HoldwaterError:
        return 0  # the ledger does not exist yet


class Tried(msgspec.Struct):
    """The fields of an exported attempt that show whether it was necessary."""

    instance: str
    sample: int
    number: int
    where: str | None
    settled: float | None = None


def _run_again(directory: Path, out: Path) -> tuple[int, int]:
    """Return the number of attempts after a finished one, and after an interrupted one."""
    exported = directory / "attempts.jsonl"
    with exported.open("wb") as file:
        hw.export(out, file, what="attempts")
    ended: dict[tuple[str, int], bool] = {}  # bound: the instances of the benchmark
    again = lost = 0
    with exported.open("rb") as lines:
        for tried in sorted(map(_tried, lines), key=lambda tried: tried.number):
            key = (tried.instance, tried.sample)
            again += ended.get(key, False)
            lost += key in ended and not ended[key]
            ended[key] = ended.get(key, False) or tried.where != "interrupted"
    return again, lost


def _tried(line: bytes) -> Tried:
    return msgspec.json.decode(line, type=Tried)


@contextmanager
def directory_of(keep: Path | None) -> Iterator[Path]:
    """Yield the directory for runs: `keep`, or a temporary one."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="holdwater-benchmark-") as made:
        yield Path(made)


if __name__ == "__main__":
    main()
