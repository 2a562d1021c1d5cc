"""`holdwater grade`: grades existing predictions, as a run like any other."""

from __future__ import annotations

from pathlib import Path

from .console import CommandConsole
from .flags import Flag, RunFlags, merge_flags


def grade(
    predictions: str,
    /,
    *,
    suite: str,
    flags: RunFlags = RunFlags(),  # noqa: B008 - frozen
    out: Path | None = None,
    config: Path | None = None,
    json: Flag = False,
    quiet: Flag = False,
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
    quiet
        Show no live display and no closing page.
    """
    console = CommandConsole.claim()
    from ..api import grading, runs
    from ..core.errors import BadInput
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
