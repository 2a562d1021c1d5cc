"""`holdwater fork`: repeat a recorded attempt up to a turn, then let the model go on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from ..core.errors import BadInput
from .console import CommandConsole
from .flags import Flag
from .run_flags import DisplayFlags, ForkFlags

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
    For example: `holdwater fork runs/mine add-1 --turn 4 --samples 8 --model gpt-5`.

    Parameters
    ----------
    run
        The recorded run's directory; `latest` is the newest in `runs/`.
    instance
        The id of the instance.
    out
        The fork's directory (default: `runs/<time>-<run>-turn-<turn>`).
    trust
        Import the code that a run of another user names.
    """
    CommandConsole.claim()
    from ..api import forking, reading
    from .foreground_run import run_in_foreground

    if place.turn is None:
        raise BadInput("missing value for `--turn`", "`holdwater transcript` shows the turns")
    options: Any = {**dataclasses.asdict(changes), **dataclasses.asdict(place), "trust": trust}
    setup = forking.prepare_fork(reading.find_run(run), instance, options.pop("turn"), out, options)
    return run_in_foreground(setup, json=display.json, quiet=display.quiet, view=display.view)
