"""`holdwater resume`: continues a run that was stopped, interrupted or killed."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from .console import CommandConsole
from .flags import Flag, find_run

RETRY_GROUP = Group("Samples to retry", sort_key=1)
SETTINGS_GROUP = Group("Settings that replace the run's own from now on", sort_key=2)


def _option(group: Group, text: str) -> Parameter:
    return Parameter(group=group, help=text, show_default=False, negative="")


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class ResumeFlags:
    """Settings that a resume changes. Each is also an option of `api.resume`."""

    retry: Annotated[
        list[str] | None,
        _option(
            RETRY_GROUP, "`failed`, `infrastructure`, `all`, or a pattern over instance ids; may be repeated"
        ),
    ] = None
    retry_poison: Annotated[
        bool | None, _option(RETRY_GROUP, "Also retry instances that crashed their workers")
    ] = None
    concurrency: Annotated[
        int | Literal["auto"] | None, _option(SETTINGS_GROUP, "Concurrent attempts, or `auto`")
    ] = None
    workers: Annotated[int | None, _option(SETTINGS_GROUP, "Worker processes that host the attempts")] = None
    attempts: Annotated[int | None, _option(SETTINGS_GROUP, "Attempts per instance")] = None
    retries: Annotated[int | None, _option(SETTINGS_GROUP, "Retries after an infrastructure failure")] = None
    timeout: Annotated[float | None, _option(SETTINGS_GROUP, "Time limit for acting, in seconds")] = None
    memory: Annotated[str | None, _option(SETTINGS_GROUP, "The memory budget, such as `8GiB`")] = None
    disk: Annotated[str | None, _option(SETTINGS_GROUP, "The disk budget, such as `80GiB`")] = None
    base_url: Annotated[str | None, _option(SETTINGS_GROUP, "The URL of the model's server")] = None
    pass_env: Annotated[
        list[str] | None,
        _option(SETTINGS_GROUP, "A variable that a suite may use as `${NAME}`; may be repeated"),
    ] = None
    rpm: Annotated[float | None, _option(SETTINGS_GROUP, "Model calls per minute")] = None
    tpm: Annotated[float | None, _option(SETTINGS_GROUP, "Tokens per minute")] = None
    run_requests: Annotated[int | None, _option(SETTINGS_GROUP, "The budget of model calls")] = None
    run_tokens: Annotated[int | None, _option(SETTINGS_GROUP, "The budget of tokens")] = None
    run_cost: Annotated[float | None, _option(SETTINGS_GROUP, "The budget of cost, in US dollars")] = None
    run_time: Annotated[float | None, _option(SETTINGS_GROUP, "The budget of time, in seconds")] = None


def resume(
    run: str | None = None,
    /,
    *,
    changes: ResumeFlags = ResumeFlags(),  # noqa: B008 - frozen
    accept_changes: Flag = False,
    trust: Flag = False,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Resume a run that was stopped or killed.

    Settled samples stay settled unless `--retry` selects them; a finished attempt does not run again.
    For example: `holdwater resume runs/mine`, or `holdwater resume runs/mine --retry infrastructure`.

    Parameters
    ----------
    run
        The run's directory; `latest` (the default) is the newest in `runs/`.
    accept_changes
        Resume even if instances of the suite changed or are missing.
    trust
        Import the code that a run of another user names.
    json
        Print the run's summary as one JSON document on stdout.
    quiet
        Show no live display and no closing page.
    """
    CommandConsole.claim()
    from .. import api
    from .foreground_run import run_in_foreground

    path = find_run(run)
    options = dataclasses.asdict(changes)
    return run_in_foreground(
        lambda around: api.aresume(
            path, accept_changes=accept_changes, around=around, trust=trust, **options
        ),
        json=json,
        quiet=quiet,
    )
