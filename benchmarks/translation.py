"""Measures the CPU of a translated call next to an untranslated one, and (`--peers`) of the same in LiteLLM.

    python benchmarks/translation.py [--quick] [--json] [--peers] [--rows 1,2,3]

Agents of Messages call a server of Chat Completions; the same conversations in Chat Completions are the
untranslated calls. Both are recorded. The load is in `gateway_load.py`. It measures; it asserts nothing.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import table
import uvloop
from gateway_litellm import PACKAGES, litellm
from gateway_load import CHAT_PATH, MESSAGES_PATH, Contender, Figures, Workload, compared, ours, upstream
from gateway_rate import QUICKLY
from raw_http import CHUNKS
from table import Row, at_most, say

SAME, TRANSLATED = "untranslated", "translated"
WORKLOADS = {
    "1": Workload("2 KB", 2_000, alone=10, at_once=16, each=15, rounds=24),
    "2": Workload("1 MB", 1_000_000, alone=2, at_once=16, each=3, rounds=8),
    "3": Workload(f"stream of {CHUNKS} events", 2_000, alone=2, at_once=16, each=3, rounds=8, stream=True),
}
MOST = 1.5  # maximum CPU of a translated call, relative to an untranslated one
LEAST_LITELLM = 15.0  # minimum CPU of LiteLLM's translation, relative to ours


def main() -> None:
    options = table.options(__doc__ or "")
    chosen = options.rows.split(",") if options.rows else list(WORKLOADS)
    with tempfile.TemporaryDirectory(prefix="holdwater-translation-") as made:
        rows = uvloop.run(measured(Path(made), chosen, quick=options.quick, peers=options.peers))
    table.show(rows, json=options.json)


async def measured(directory: Path, chosen: list[str], *, quick: bool, peers: bool) -> list[Row]:
    rows: list[Row] = []
    with contenders(directory, rows, peers=peers) as who:
        for number in chosen:
            workload = WORKLOADS[number]
            say(f"{workload.name}: {', '.join(contender.name for contender in who)}")
            rounds = max(2, workload.rounds // (QUICKLY if quick else 1))
            rows += _figures(workload.name, await compared(who, workload, rounds))
    return rows


@contextmanager
def contenders(directory: Path, rows: list[Row], *, peers: bool) -> Iterator[list[Contender]]:
    """Run all available contenders; add a row with the reason for each missing one."""
    with ExitStack() as stack:
        port = stack.enter_context(upstream())
        sessions = max(workload.at_once for workload in WORKLOADS.values())
        who = []
        for name, path in ((SAME, CHAT_PATH), (TRANSLATED, MESSAGES_PATH)):
            place = directory / name
            place.mkdir()
            who.append(stack.enter_context(ours(port, sessions, place, name, path)))
        if peers:
            try:
                who.append(stack.enter_context(litellm(port, directory, MESSAGES_PATH)))
            except (OSError, subprocess.SubprocessError) as error:
                hint = f"`pip install {' '.join(PACKAGES)}` in a virtual environment"
                rows.append(Row("not run", f"cannot be had: {error} (it takes {hint})", who="LiteLLM"))
        yield who


def _figures(name: str, seen: dict[str, Figures]) -> list[Row]:
    rows = []
    for who, figures in seen.items():
        rows += [
            Row(f"{name}: CPU a request", round(1000 * figures.cpu, 3), "ms", who=who),
            Row(f"{name}: p50", round(1000 * figures.quantile(0.5), 2), "ms", who=who),
        ]
    ours = seen[TRANSLATED].cpu
    rows.append(at_most(f"{name}: CPU translated / untranslated", ours / seen[SAME].cpu, MOST, "x"))
    for who, figures in seen.items():
        if who not in (SAME, TRANSLATED):
            less = figures.cpu / ours
            target = (f">= {LEAST_LITELLM:g}", less >= LEAST_LITELLM)
            rows.append(Row(f"{name}: CPU of {who} / ours", round(less, 1), "x", *target))
    return rows


if __name__ == "__main__":
    main()
