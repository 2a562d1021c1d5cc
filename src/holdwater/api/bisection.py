"""The search for the turn at which an attempt was lost, as typed calls: forks from turns, by binary search.

Its state is the forks themselves, in one directory: the same call continues a search. The decisions are in
`core/bisection.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Unpack

from msgspec import structs

from ..conversation.trajectory import ExchangeTree
from ..core.bisection import (
    BisectReport,
    SearchCost,
    SearchResult,
    TurnProbe,
    choose_probe,
    conclude_search,
    list_costliest_search,
)
from ..core.config import RunConfig
from ..core.errors import BadInput, HoldwaterError, RunInterrupted, RunStopped
from ..core.prices import add_cost
from ..core.records import NO_USAGE
from ..ledger.directory import RunDirectory
from ..ledger.reader import LedgerReader
from ..run.setup.config import default_directory
from .forking import ForkOptions, choose_objects, name_origin, prepare_fork
from .process import wait
from .runs import RunSetup, prepare_resume, start

BRANCHES = 4  # at each turn


def bisect(
    path: str | Path, instance: str, *, out: str | Path | None = None, **options: Unpack[ForkOptions]
) -> BisectReport:
    """Find the last turn of an attempt from which at least half of the branches pass, by binary search.

    The forks of the search are in `out`; the same call with the same `out` continues it.
    """
    return wait(abisect(path, instance, out=out, **options))


async def abisect(
    path: str | Path, instance: str, *, out: str | Path | None = None, **options: Unpack[ForkOptions]
) -> BisectReport:
    """The async twin of `bisect`."""
    search = TurnSearch(path, instance, out, options)
    while (turn := search.next_turn) is not None:
        search.add_probe(turn, (await start(search.prepare_probe(turn))).state)
    return search.report()


class TurnSearch:
    """A search, with the probes that are on disk."""

    def __init__(self, path: str | Path, instance: str, out: str | Path | None, options: ForkOptions) -> None:
        if options.get("say") is not None or options.get("then_say") is not None:
            raise BadInput("a search changes no reply", "leave out `--say` and `--then-say`")
        self._path, self._instance = path, instance
        self._options: ForkOptions = {**options, "samples": options.get("samples") or BRANCHES}
        fork = self._prepare(0).config
        assert fork.fork is not None
        tree = ExchangeTree(RunDirectory.open(path), fork.fork.attempt)
        threads = tree.threads()
        main = threads[0].numbers if threads else ()
        self.turns = [0, *(number for number in main if tree.exchange(number).complete)]
        if len(self.turns) == 1:
            raise BadInput(f"the attempt has no turn to fork from: `{instance}`")
        self._origin = structs.replace(fork.fork, turn=self.turns[-1])
        self._config = fork
        self.most = estimate_search(tree, self.turns, fork)
        self.directory = Path(out) if out is not None else default_directory(f"{name_origin(path)}-bisect")
        self._probes: dict[int, TurnProbe] = {}  # bound: the turns of an attempt
        for turn in self.turns:
            if self._place(turn).exists():
                self._check_probe(turn)
                with LedgerReader(self._place(turn)) as reader:
                    if reader.summary().state == "finished":
                        self.add_probe(turn)

    @property
    def next_turn(self) -> int | None:
        """The turn to probe next; None: the search is over."""
        return choose_probe(self.turns, {turn: probe.passes for turn, probe in self._probes.items()})

    def prepare_probe(self, turn: int) -> RunSetup:
        """Prepare the fork from a turn, or its continuation."""
        place = self._place(turn)
        if not place.exists():
            return structs.replace(self._prepare(turn), path=place)
        objects, trust = choose_objects(self._options), self._options.get("trust", False)
        return prepare_resume(place, objects, {}, trust=trust)

    def add_probe(self, turn: int, state: str = "finished") -> TurnProbe:
        """Read the branches of a fork that has ended; raise if they cannot decide."""
        with LedgerReader(self._place(turn)) as reader:
            summary = reader.summary()
            failure = next((row.failure for row in reader.outcomes() if row.failure), "")
        passed, failed = summary.outcomes.get("passed", 0), summary.outcomes.get("failed", 0)
        if state != "finished":
            stop = RunInterrupted if state == "interrupted" else RunStopped
            raise stop(
                f"the search stopped at turn {turn}: {summary.reason}",
                f"the same command with `--out {self.directory}` continues it",
            )
        if not passed + failed:
            raise HoldwaterError(
                f"no branch from turn {turn} has a score: {failure}",
                f"`holdwater resume {self._place(turn)} --retry infrastructure`, then the same command again",
            )
        self._probes[turn] = TurnProbe(
            turn=turn,
            passed=passed,
            scored=passed + failed,
            unscored=summary.settled - passed - failed,
            usage=summary.usage,
            directory=str(self._place(turn)),
        )
        return self._probes[turn]

    def report(self) -> BisectReport:
        result, turn, statement = conclude_search(self.turns, self._probes)
        usage = NO_USAGE
        for probe in self._probes.values():
            usage = usage.plus(probe.usage)
        lost = (
            self.turns[self.turns.index(turn) + 1]
            if turn is not None and result is SearchResult.LOST
            else None
        )
        return BisectReport(
            directory=str(self.directory),
            origin=self._origin,
            samples=self._config.samples,
            result=result,
            turn=turn,
            lost=lost,
            statement=statement,
            probes=tuple(probe for _, probe in sorted(self._probes.items())),
            most=self.most,
            usage=usage,
            cost=usage.cost,
        )

    def _prepare(self, turn: int) -> RunSetup:
        return prepare_fork(self._path, self._instance, turn, None, self._options)

    def _place(self, turn: int) -> Path:
        return self.directory / f"turn-{turn}"

    def _check_probe(self, turn: int) -> None:
        """Raise BadInput if the directory holds the fork of another search."""
        found = RunDirectory.open(self._place(turn)).read_config()
        expected = structs.replace(self._origin, turn=turn)
        names = ("model", "sampling", "samples", "agent", "agent_options")
        if found.fork != expected or any(getattr(found, n) != getattr(self._config, n) for n in names):
            raise BadInput(
                f"the directory holds the forks of another search: `{self.directory}`", "give another `--out`"
            )


def estimate_search(tree: ExchangeTree, turns: list[int], config: RunConfig) -> SearchCost:
    """Return the most that a search may need, if branches go on as the recorded attempt did."""
    numbers = sorted(tree.numbers())
    probed = list_costliest_search(turns, [len(numbers) - bisect_right(numbers, turn) for turn in turns])
    after = dict.fromkeys(probed, NO_USAGE)
    for number in numbers:
        exchange = tree.exchange(number)
        counts = structs.replace(exchange.usage.plus(exchange.saved), nanodollars=0, priced=0)
        for turn in probed:
            if number > turn:
                after[turn] = after[turn].plus(add_cost(counts, config.price))
    usage = NO_USAGE
    for turn in probed:
        for _ in range(config.samples):
            usage = usage.plus(after[turn])
    most = 2 + max(0, len(turns) - 2).bit_length()
    return SearchCost(probes=most, usage=usage, cost=usage.cost)
