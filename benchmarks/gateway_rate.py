"""Measures the gateway's cost per call, next to direct calls, a bare aiohttp proxy and (`--peers`) LiteLLM.

    python benchmarks/gateway_rate.py [--quick] [--json] [--peers] [--rows 1,4]

Rows 1 to 4 are the workloads, row 5 is the cost of recording alone, row 6 is a crowd of agents. The load is
in `gateway_load.py`, the contenders are in `gateway_proxies.py`. It measures; it asserts nothing.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import table
import uvloop
from gateway_litellm import PACKAGES, litellm
from gateway_load import Caller, Contender, Figures, Workload, bare, compared, ours, upstream
from gateway_proxies import Listening
from gateway_recording import hashing, recording
from gauge import MB
from raw_http import CHUNKS
from table import Row, at_most, say

DIRECT, BARE, OURS = "direct", "bare aiohttp", "holdwater"
WORKLOADS = {
    "1": Workload("2 KB", 2_000, alone=30, at_once=16, each=15, rounds=24),
    "2": Workload("1 MB", 1_000_000, alone=6, at_once=64, each=2, rounds=8),
    "3": Workload("8 MB", 8_000_000, alone=3, at_once=4, each=3, rounds=6),
    "4": Workload(f"stream of {CHUNKS} chunks", 2_000, alone=3, at_once=16, each=3, rounds=8, stream=True),
}
QUICKLY = 4  # factor by which a quick run has fewer rounds
MOST = {"1": 2.0, "2": 1.3, "4": 2.0}  # maximum CPU, relative to a bare proxy
ADDED = 1.0  # maximum added latency at the median, in ms
LEAST_LITELLM = 20.0  # minimum CPU of LiteLLM, relative to ours, at 2 KB
RECORDING = {"1 MB": (1_000_000, 0.3), "8 MB": (8_000_000, 2.0)}  # bytes, ms per turn
TURNS = 60  # turns recorded for row 5
CROWD = Workload("10 KB", 10_000, alone=0, at_once=1000, each=1, rounds=30, said=20)
GROWTH = 1.0  # KB per agent over the second half of the rounds: the state of a conversation


def main() -> None:
    options = table.options(__doc__ or "")
    chosen = options.rows.split(",") if options.rows else [*WORKLOADS, "5", "6"]
    with tempfile.TemporaryDirectory(prefix="holdwater-rate-") as made:
        rows = uvloop.run(measured(Path(made), chosen, quick=options.quick, peers=options.peers))
    table.show(rows, json=options.json)


async def measured(directory: Path, chosen: Sequence[str], *, quick: bool, peers: bool) -> list[Row]:
    rows: list[Row] = []
    workloads = {number: WORKLOADS[number] for number in chosen if number in WORKLOADS}
    if workloads:
        with contenders(directory, rows, peers=peers) as who:
            for number, workload in workloads.items():
                say(f"{workload.name}: {', '.join(contender.name for contender in who)}")
                rounds = max(2, workload.rounds // (QUICKLY if quick else 1))
                rows += _figures(number, workload, await compared(who, workload, rounds))
    if "5" in chosen:
        for name in RECORDING:
            rows += await _recorded(directory, name)
    if "6" in chosen:
        rows += await _crowd(directory, CROWD.rounds // (QUICKLY if quick else 1))
    return rows


@contextmanager
def contenders(directory: Path, rows: list[Row], *, peers: bool) -> Iterator[list[Contender]]:
    """Run all available contenders; add a row with the reason for each missing one."""
    with ExitStack() as stack:
        port = stack.enter_context(upstream())
        sessions = max(workload.at_once for workload in WORKLOADS.values())
        place = directory / "ours"
        place.mkdir()
        who = [
            Contender(DIRECT, Listening(port, ["sk-any"]), None),
            stack.enter_context(bare(port)),
            stack.enter_context(ours(port, sessions, place)),
        ]
        if peers:
            try:
                who.append(stack.enter_context(litellm(port, directory)))
            except (OSError, subprocess.SubprocessError) as error:
                hint = f"`pip install {' '.join(PACKAGES)}` in a virtual environment"
                rows.append(Row("not run", f"cannot be had: {error} (it takes {hint})", who="LiteLLM"))
        yield who


def _figures(number: str, workload: Workload, seen: dict[str, Figures]) -> list[Row]:
    name, rows = workload.name, []
    direct = seen[DIRECT].quantile(0.5)
    for who, figures in seen.items():
        p50, p99 = 1000 * figures.quantile(0.5), 1000 * figures.quantile(0.99)
        rows.append(Row(f"{name}: p50 / p99", f"{p50:.2f} / {p99:.2f}", "ms", who=who))
        if who == DIRECT:
            continue
        added = p50 - 1000 * direct
        target = at_most("", added, ADDED, "") if who == OURS and number in ("1", "4") else Row("", 0.0)
        rows += [
            Row(f"{name}: added p50", round(added, 2), "ms", target.target, target.met, who),
            Row(f"{name}: CPU a request", round(1000 * figures.cpu, 3), "ms", who=who),
            Row(f"{name}: memory before / peak / after", _memory(figures), "MB", who=who),
        ]
    return rows + _ratios(number, name, seen)


def _ratios(number: str, name: str, seen: dict[str, Figures]) -> list[Row]:
    times = seen[OURS].cpu / seen[BARE].cpu
    what = f"{name}: CPU / that of a bare pass-through"
    rows = [at_most(what, times, MOST[number], "x") if number in MOST else Row(what, round(times, 2), "x")]
    for who, figures in seen.items():
        if who not in (DIRECT, BARE, OURS):
            less = figures.cpu / seen[OURS].cpu
            target = (f">= {LEAST_LITELLM:g}", less >= LEAST_LITELLM) if number == "1" else ("", None)
            rows.append(Row(f"{name}: CPU of {who} / ours", round(less, 1), "x", *target))
    return rows


def _memory(figures: Figures) -> str:
    return " / ".join(
        f"{size / MB:.0f}" for size in (figures.before, figures.memory.peak, figures.memory.now)
    )


async def _recorded(directory: Path, name: str) -> list[Row]:
    say(f"recording at {name}")
    size, most = RECORDING[name]
    with tempfile.TemporaryDirectory(dir=directory) as place:
        seconds = await recording(size, TURNS, Path(place))
    return [
        at_most(f"recording a turn at {name}", 1000 * seconds, most, "ms"),
        Row(f"of it about: one hash of {name}", round(1000 * hashing(size, TURNS), 2), "ms"),
    ]


async def _crowd(directory: Path, rounds: int) -> list[Row]:
    """Measure many concurrent agents: each keeps its connection, its session and its conversation."""
    what = f"{CROWD.at_once} agents connected at once"
    say(what)
    place = directory / "crowd"
    place.mkdir()
    with upstream() as port, ours(port, CROWD.at_once, place) as contender:
        resting = contender.memory().now
        caller = Caller(contender, CROWD)
        await caller.open()
        sizes = []
        for _ in range(rounds):
            seen = await caller.round()
            sizes.append(contender.memory().now)
        peak = contender.memory().peak
        caller.close()
    half = rounds // 2
    grown = (sizes[-1] - sizes[half - 1]) / CROWD.at_once / 1000
    steps = (resting, sizes[0], sizes[half - 1], sizes[-1], peak)
    figures = " / ".join(f"{size / MB:.0f}" for size in steps)
    return [
        Row(f"{what}: memory idle / round 1 / {half} / {rounds} / peak", figures, "MB"),
        at_most(f"{what}: growth from round {half} to {rounds}", grown, GROWTH, "KB an agent"),
        Row(f"{what}: calls a second", round(seen.rate), "1/s"),
        Row(f"{what}: CPU a request", round(1000 * seen.cpu, 3), "ms"),
    ]


if __name__ == "__main__":
    main()
