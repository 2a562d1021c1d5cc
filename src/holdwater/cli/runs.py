"""`holdwater run`, `grade`, `resume`, `regrade` and `replay`: start a run from flags, or reopen one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import BadInput
from .console import CommandConsole
from .flags import Flag, LatestRun, Patterns, Quiet, Trust
from .run_flags import DisplayFlags, ResumeFlags, RunFlags, merge_flags

if TYPE_CHECKING:
    from ..api.runs import RunSetup

FIRST = 10  # instances that a dry run names


def run(
    suite: str,
    /,
    *,
    flags: RunFlags = RunFlags(),  # noqa: B008 - frozen
    out: Path | None = None,
    config: Path | None = None,
    dry_run: Flag = False,
    display: DisplayFlags = DisplayFlags(),  # noqa: B008 - frozen
) -> int:
    """Run a suite with an agent.

    For example: `holdwater run demo`, or
    `holdwater run tasks.jsonl --agent bash --model gpt-5 --concurrency 30 --timeout 1800 --out runs/mine`.

    Exit status: 0 all settled, 1 settled with infrastructure failures left, 2 bad input, 3 interrupted and
    resumable, 4 stopped by a budget or a failure that affects every instance.

    Parameters
    ----------
    suite
        `demo`, `file.jsonl`, `path.py:name`, `module:name` or a plug-in.
    out
        The run's directory (default: `runs/<time>-<suite>`).
    config
        A TOML file with flags; flags on the command line take precedence.
    dry_run
        Print the plan of the run, and do nothing.
    """
    console = CommandConsole.claim()
    from ..api import runs

    said = merge_flags(flags, config)
    agent = choose_agent(said.pop("agent"), said.pop("command"))
    prepared = runs.prepare(suite, agent, out, said)  # type: ignore[arg-type]
    if dry_run:
        return _print_dry_run(prepared, console, display.json)
    from .foreground_run import run_in_foreground

    return run_in_foreground(prepared, json=display.json, quiet=display.quiet, view=display.view)


def resume(
    run: LatestRun = None,
    /,
    *,
    changes: ResumeFlags = ResumeFlags(),  # noqa: B008 - frozen
    accept_changes: Flag = False,
    trust: Trust = False,
    json: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Resume a run that was stopped or killed.

    Settled samples stay settled unless `--retry` selects them; a finished attempt does not run again.
    For example: `holdwater resume runs/mine`, or `holdwater resume runs/mine --retry infrastructure`.

    Parameters
    ----------
    accept_changes
        Resume even if instances of the suite changed or are missing.
    json
        Print the run's summary as one JSON document on stdout.
    """
    CommandConsole.claim()
    from ..api import reading, runs
    from .foreground_run import run_in_foreground

    options: Any = dataclasses.asdict(changes)
    setup = runs.prepare_resume(
        reading.find_run(run), runs.CallerObjects(), options, accept_changes=accept_changes, trust=trust
    )
    return run_in_foreground(setup, json=json, quiet=quiet)


def regrade(
    run: LatestRun = None,
    /,
    *,
    only: Patterns = None,
    trust: Trust = False,
    json: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Grade a run's work again without running the agent.

    The work of each chosen attempt is put into a new sandbox and graded with the suite's current grading.
    All outcomes change together, when all of them are graded; `holdwater resume` continues an interrupted
    regrade. Work that cannot be restored completely keeps its grade, and its row says `not regraded`.
    For example: `holdwater regrade runs/mine --only 'add-*'`.

    Parameters
    ----------
    only
        Only instances whose id matches this pattern; may be repeated.
    json
        Print the run's summary as one JSON document on stdout.
    """
    CommandConsole.claim()
    from ..api import reading, runs
    from .foreground_run import run_in_foreground

    setup = runs.prepare_regrade(reading.find_run(run), only or (), trust=trust)
    return run_in_foreground(setup, json=json, quiet=quiet)


def replay(
    run: str | None = None,
    /,
    *,
    out: Path | None = None,
    only: Patterns = None,
    trust: Trust = False,
    json: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Run the attempts of a run again, with its recorded replies and without a model.

    The replay gets a new run directory. If an agent makes a model call that is not recorded, its attempt ends
    with the verdict `model` (`unrecorded`). For example: `holdwater replay runs/mine --only 'add-*'`.

    Parameters
    ----------
    run
        The recorded run's directory; `latest` (the default) is the newest in `runs/`.
    out
        The new run's directory (default: `runs/<time>-<suite>-replay`).
    only
        Only instances whose id matches this pattern; may be repeated.
    json
        Print the new run's summary as one JSON document on stdout.
    """
    CommandConsole.claim()
    from ..api import reading, runs
    from .foreground_run import run_in_foreground

    setup = runs.prepare_replay(reading.find_run(run), out, only or (), trust=trust)
    return run_in_foreground(setup, json=json, quiet=quiet)


def grade(
    predictions: str,
    /,
    *,
    suite: str,
    flags: RunFlags = RunFlags(),  # noqa: B008 - frozen
    out: Path | None = None,
    config: Path | None = None,
    json: Flag = False,
    quiet: Quiet = False,
) -> int:
    """Grade existing predictions.

    For example: `holdwater grade predictions.jsonl --suite swebench:rows.jsonl --out runs/graded`.
    This is a run like any other, with the predictions instead of an agent. The report is written to
    `report.json` in its directory.

    Parameters
    ----------
    predictions
        A `.jsonl` or `.json` file of `{instance_id, model_name_or_path, model_patch}`; `gold` stands for the
        reference patches, `empty` for empty patches.
    suite
        `swebench:FILE` or `swt:FILE`, with `.jsonl`, `.json` or `.parquet` rows.
    out
        The run's directory (default: `runs/<time>-<suite>`).
    config
        A TOML file with flags; flags on the command line take precedence.
    json
        Print the report as one JSON document on stdout.
    """
    console = CommandConsole.claim()
    from ..api import grading, runs
    from .foreground_run import close_run, watch_run

    said = merge_flags(flags, config)
    if said.pop("agent") is not None or said.pop("command") is not None:
        raise BadInput("predictions are graded without an agent", hint="leave out `--agent` and `--command`")
    options = grading.narrow_options(predictions, suite, said)  # type: ignore[arg-type]
    summary = watch_run(runs.prepare(suite, grading.agent_of(predictions), out, options), quiet=quiet)
    report = grading.write_report(summary.directory, suite)
    if json:
        console.write_json(report)
    return close_run(summary, json=False, quiet=quiet)


def choose_agent(agent: str | None, command: str | None) -> str | None:
    """Return the agent `command:LINE` for `--agent command --command LINE`, or for `--command LINE` alone."""

    if command is None:
        if agent == "command":
            raise BadInput(
                "`--agent command` needs `--command`", "for example `--command 'mytool {instruction}'`"
            )
        return agent
    if agent not in (None, "command"):
        raise BadInput(f"`--command` requires `--agent command`, not `{agent}`")
    return f"command:{command}"


def _print_dry_run(prepared: RunSetup, console: CommandConsole, json: bool) -> int:
    """Print the plan of the run."""
    from ..api.process import complete
    from ..api.start_checks import preview

    first, total = complete(preview(prepared, FIRST))
    if json:
        console.write_json(
            {"directory": prepared.path, "config": prepared.config, "instances": total, "first": first}
        )
        return 0
    config, limits = prepared.config, prepared.config.limits
    lines = [
        f"would run suite `{config.suite}` with agent `{config.agent}` on model `{config.model or 'none'}`",
        f"instances: {'unknown before the run' if total is None else total}, "
        f"samples {config.samples}, attempts {config.attempts}, retries {config.retries}",
        f"first: {', '.join(first)}{', ...' if len(first) == FIRST else ''}",
        f"at once: at most {config.slots} attempts in {config.workers} workers, as the budget allows",
        f"limits: set-up {limits.setup:g} s, acting {limits.acting:g} s, grading {limits.grading:g} s",
        f"directory: {prepared.path}",
    ]
    console.write_page("\n".join(lines))
    return 0
