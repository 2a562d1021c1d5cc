"""`holdwater fork`: repeat a recorded attempt up to a turn, then let the model go on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from ..core.errors import BadInput
from .console import CommandConsole
from .flags import Flag
from .run_flags import DisplayFlags, ForkFlags

if TYPE_CHECKING:
    from ..api.bisection import TurnSearch

PLACE_GROUP = Group("Where the fork begins", sort_key=-1)


def describe_place(text: str) -> Parameter:
    return Parameter(group=PLACE_GROUP, help=text, show_default=False, negative="")


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class PlaceFlags:
    """The recorded turn after which a fork goes on, and a change to its reply."""

    turn: Annotated[
        int | None,
        describe_place("The last turn to repeat, as `holdwater transcript` numbers them; 0: none"),
    ] = None
    sample: Annotated[int, describe_place("The sample of the instance (0)")] = 0
    attempt: Annotated[
        int | None, describe_place("The attempt, by its number (default: the one that decided the outcome)")
    ] = None
    say: Annotated[
        str | None, describe_place("The model's reply in that turn, in place of the recorded one")
    ] = None
    then_say: Annotated[
        str | None, describe_place("Text that follows the recorded reply of that turn, as a part of it")
    ] = None
    bisect: Annotated[
        bool,
        describe_place("Find the last turn from which at least half of `--samples` branches pass (4)"),
    ] = False
    drift: Annotated[
        bool, describe_place("Go on if a repeated request differs: it gets its recorded reply all the same")
    ] = False


def fork(
    run: str,
    instance: str,
    /,
    *,
    place: PlaceFlags = PlaceFlags(),  # noqa: B008 - frozen
    changes: ForkFlags = ForkFlags(),  # noqa: B008 - frozen
    out: Path | None = None,
    trust: Flag = False,
    display: DisplayFlags = DisplayFlags(),  # noqa: B008 - frozen
) -> int:
    """Repeat a recorded attempt up to a turn, then go on with the model.

    The agent runs again in a new sandbox and gets the recorded replies, at no cost, up to `--turn`. Each of
    `--samples` branches then goes its own way. The fork is a run of its own, with the settings of the
    recorded run, one sample and one attempt, unless flags have others.
    For example: `holdwater fork runs/mine add-1 --turn 4 --samples 8 --model gpt-5`, or
    `holdwater fork runs/mine add-1 --bisect` to find the turn in which the attempt was lost.

    Parameters
    ----------
    run
        The recorded run's directory; `latest` is the newest in `runs/`.
    instance
        The id of the instance.
    out
        The fork's directory (default: `runs/<time>-<run>-turn-<turn>`). A search has its forks below it, and
        the same command with the same directory continues it.
    trust
        Import the code that a run of another user names.
    """
    CommandConsole.claim()
    from ..api import forking, reading
    from ..api.bisection import TurnSearch
    from .foreground_run import run_in_foreground

    options: Any = {**dataclasses.asdict(changes), **dataclasses.asdict(place), "trust": trust}
    turn, searches = options.pop("turn"), options.pop("bisect")
    if searches:
        if turn is not None:
            raise BadInput("`--bisect` chooses the turns itself", "leave out `--turn`")
        return search_turn(TurnSearch(reading.find_run(run), instance, out, options), display)
    if turn is None:
        raise BadInput("missing value for `--turn`", "`holdwater transcript` shows the turns")
    setup = forking.prepare_fork(reading.find_run(run), instance, turn, out, options)
    return run_in_foreground(setup, json=display.json, quiet=display.quiet, view=display.view)


def search_turn(search: TurnSearch, display: DisplayFlags) -> int:
    """Fork from turn after turn until the search is over; print what each fork says."""
    from ..view.bisection import render_bisection, render_plan, render_probe
    from .foreground_run import watch_run

    console = CommandConsole.current or CommandConsole.claim()
    console.say(render_plan(search.most, search.turns))
    while (turn := search.next_turn) is not None:
        console.say(f"turn {turn}: {search.directory}/turn-{turn}")
        summary = watch_run(search.prepare_probe(turn), quiet=display.quiet, view=display.view)
        console.say(render_probe(search.add_probe(turn, summary.state)))
    report = search.report()
    console.write_result(report, lambda: render_bisection(report), json=display.json)
    console.flush()
    return 0
