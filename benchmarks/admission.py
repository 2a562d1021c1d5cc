"""Compares the attempts that the memory budget admits with fixed concurrency, in one small container.

    python benchmarks/admission.py [--quick] [--json] [--keep DIRECTORY]

150 sandboxes that peak between 10 and 200 MB (log-normal, mean 40) run in a real memory group of 512 MiB:
once governed with `--concurrency 30`, and without the governor at fixed numbers. Too large numbers are
killed. The benchmark needs permission to create a control group. It measures; it asserts nothing.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path

import table
from group import GREEDY, Group, NoGroup, Played, memory_group
from table import Row, say

from holdwater.core.records import MiB

LIMIT = 512 * MiB
SWEEP, QUICK = (3, 4, 5, 6, 7, 8, 10, 30), (4, 6)
TARGET = 1.25


def main() -> None:
    options = table.options(__doc__ or "")
    made = nullcontext(str(options.keep)) if options.keep else tempfile.TemporaryDirectory()
    with made as directory:
        try:
            rows = measured(Path(directory), quick=options.quick)
        except NoGroup as error:
            rows = [Row("not run", f"no control group can be made here: {error}")]
    if options.peers:
        rows.append(Row("not run", "none of them admits by memory", who="peers"))
    table.show(rows, json=options.json)


def measured(directory: Path, *, quick: bool) -> list[Row]:
    suite, sweep = ("few", QUICK) if quick else ("many", SWEEP)
    rows, best = [], None
    for at_once in sweep:
        played, kills = once(directory / f"fixed-{at_once}", suite, at_once, "--ungoverned")
        whole = not kills and played.status == 0
        rows += told(f"fixed, {at_once} at once", played, kills)
        best = min(best or played.seconds, played.seconds) if whole else best
    governed, kills = once(directory / "governed", suite, 30)
    rows += told("governed, `--concurrency 30`", governed, kills)
    rows.append(Row("governed: kills outside a sandbox's own limit", kills, "", "0", kills == 0))
    if best is not None:
        ratio = round(governed.seconds / best, 2)
        rows.append(
            Row("governed against the best fixed one that lives", ratio, "x", f"<= {TARGET}", ratio <= TARGET)
        )
    return rows


def once(out: Path, suite: str, at_once: int, *more: str) -> tuple[Played, int]:
    say(f"{out.name}: {suite}")
    with memory_group(LIMIT) as group:
        played = _play(group, out, suite, at_once, *more)
        return played, group.kills()


def _play(group: Group, out: Path, suite: str, at_once: int, *more: str) -> Played:
    agent = ("--agent", f"{GREEDY}:in_sandbox")
    return group.run(out, f"{GREEDY}:{suite}", *agent, "--concurrency", str(at_once), *more, seconds=900)


def told(what: str, played: Played, kills: int) -> list[Row]:
    outcomes = ", ".join(f"{n} {kind}" for kind, n in played.summary.get("outcomes", {}).items())
    again = played.summary.get("attempts", 0) - played.summary.get("settled", 0)
    return [
        Row(f"{what}: time", round(played.seconds, 1), "s"),
        Row(f"{what}: most memory in use", round(played.highest / MiB), "MiB"),
        Row(f"{what}: outcomes", f"{outcomes or 'none'}; {again} tried again; {kills} killed by the group"),
    ]


if __name__ == "__main__":
    main()
