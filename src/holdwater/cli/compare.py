"""`holdwater compare`: the difference between runs of one suite, and whether it is more than chance."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from .console import CommandConsole
from .flags import Flag

WORSE = 5  # exit status


def compare(
    baseline: str,
    run: str,
    /,
    *others: str,
    by: str | None = None,
    fail_if_worse: Annotated[str | None, Parameter(name="--fail-if-worse")] = None,
    json: Flag = False,
) -> int:
    """Compare runs of one suite, instance by instance: fixed, broken, and the difference with its interval.

    Instances are matched by id and content. Samples without a score are left out; they are never zeros. The
    exit status is 0; with `--fail-if-worse` it is 5 if a run is worse than the baseline beyond chance.

    For example: `holdwater compare runs/before runs/after`, or in CI
    `holdwater compare runs/main runs/branch --fail-if-worse 2% --json`.

    Parameters
    ----------
    baseline
        The directory of the run to compare with; `latest` is the newest in `runs/`.
    run
        The directory of a run of the same suite.
    others
        Further runs, each of which is compared with the baseline.
    by
        Add a row for each value of this field of the instances' data, for example `repo` (default: `tags`).
    fail_if_worse
        Exit with status 5 if the whole interval of a difference is worse than this, for example `2%` or `0`.
    json
        Print one JSON document.
    """
    from ..api.comparison import compare as compare_runs
    from ..view.comparison import render_comparison

    tolerance = None if fail_if_worse is None else parse_tolerance(fail_if_worse)
    report = compare_runs(baseline, run, *others, by=by)
    CommandConsole().write_result(report, lambda: render_comparison(report), json=json)
    if tolerance is None:
        return 0
    return WORSE if any(pair.is_worse(tolerance) for pair in (report, *report.others)) else 0


def parse_tolerance(text: str) -> float:
    """Return `2%` or `0.02` as a share."""
    from ..core.errors import BadInput

    percent = text.endswith("%")
    try:
        share = float(text.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise BadInput(f"invalid value for `--fail-if-worse`: `{text}`", "a share such as `2%` or `0.02`")
    return share
