"""`holdwater resume`: go on with a run that was stopped, interrupted or killed."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from .console import Console
from .flags import Flag, find_run

AGAIN = Group("What is tried again", sort_key=1)
INSTEAD = Group("In place of the run's own settings, from now on", sort_key=2)


def _in(group: Group, text: str) -> Parameter:
    return Parameter(group=group, help=text, show_default=False, negative="")


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Changes:
    """What a resume does otherwise than the run so far. Each is an option of `api.resume` too."""

    retry: Annotated[
        list[str] | None,
        _in(AGAIN, "`failed`, `infrastructure`, `all`, or a pattern over instance ids; may be repeated"),
    ] = None
    retry_poison: Annotated[bool | None, _in(AGAIN, "Instances that took their workers down")] = None
    concurrency: Annotated[int | Literal["auto"] | None, _in(INSTEAD, "Attempts at once, or `auto`")] = None
    workers: Annotated[int | None, _in(INSTEAD, "Processes that host them")] = None
    attempts: Annotated[int | None, _in(INSTEAD, "Goes at an instance")] = None
    retries: Annotated[int | None, _in(INSTEAD, "Further tries after an infrastructure failure")] = None
    timeout: Annotated[float | None, _in(INSTEAD, "Seconds for acting")] = None
    memory: Annotated[str | None, _in(INSTEAD, "The budget of memory, such as `8GiB`")] = None
    disk: Annotated[str | None, _in(INSTEAD, "The budget of disk, such as `80GiB`")] = None
    base_url: Annotated[str | None, _in(INSTEAD, "The model's server")] = None
    pass_env: Annotated[
        list[str] | None, _in(INSTEAD, "Variables that a suite may ask for by `${NAME}`; may be repeated")
    ] = None
    rpm: Annotated[float | None, _in(INSTEAD, "Model calls a minute")] = None
    tpm: Annotated[float | None, _in(INSTEAD, "Tokens a minute")] = None
    run_requests: Annotated[int | None, _in(INSTEAD, "The budget of model calls")] = None
    run_tokens: Annotated[int | None, _in(INSTEAD, "The budget of tokens")] = None
    run_cost: Annotated[float | None, _in(INSTEAD, "The budget of cost, in US dollars")] = None
    run_time: Annotated[float | None, _in(INSTEAD, "The budget of seconds")] = None


def resume(
    run: str | None = None,
    /,
    *,
    changes: Changes = Changes(),  # noqa: B008 - frozen
    accept_changes: Flag = False,
    trust: Flag = False,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Go on with a run that was stopped or killed.

    Settled samples stay settled, unless `--retry` names them; an attempt that had finished is not run again.
    For example: `holdwater resume runs/mine`, or `holdwater resume runs/mine --retry infrastructure`.

    Parameters
    ----------
    run
        The run's directory; `latest`, or nothing, is the newest in `runs/`.
    accept_changes
        Resume although instances of the suite changed or vanished.
    trust
        Import the code that another user's run names.
    json
        Print the run's summary as one JSON document on stdout.
    quiet
        No display and no closing page.
    """
    Console.claim()
    from .. import api
    from .conduct import conducted

    path = find_run(run)
    options = dataclasses.asdict(changes)
    return conducted(
        lambda around: api.aresume(
            path, accept_changes=accept_changes, around=around, trust=trust, **options
        ),
        json=json,
        quiet=quiet,
    )
