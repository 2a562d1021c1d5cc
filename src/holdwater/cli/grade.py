"""`holdwater grade`: grade predictions that someone made, as a run like any other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .console import Console
from .flags import Flag
from .run import Flags
from .settings import merged

if TYPE_CHECKING:
    from ..api import Around
    from ..core.summary import Summary


def grade(
    predictions: str,
    /,
    *,
    suite: str,
    flags: Flags = Flags(),  # noqa: B008 - frozen
    out: Path | None = None,
    config: Path | None = None,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Grade predictions that someone made.

    For example: `holdwater grade predictions.jsonl --suite swebench:rows.jsonl --out runs/graded`.
    It is a run like any other, with the predictions in the place of an agent; the report is written to its
    directory as `report.json`.

    Parameters
    ----------
    predictions
        A `.jsonl` or `.json` file of `{instance_id, model_name_or_path, model_patch}`; `gold` is the
        reference's own patches, `empty` none.
    suite
        `swebench:FILE` or `swt:FILE`, with `.jsonl`, `.json` or `.parquet` rows.
    out
        The run's directory; `runs/<time>-<suite>` otherwise.
    config
        A TOML file with flags; those given here come first.
    json
        Print the report as one JSON document on stdout.
    quiet
        No display and no closing page.
    """
    console = Console.claim()
    from .. import api
    from ..api import grading
    from ..core.errors import BadInput
    from ..ledger.private import write_private
    from .conduct import conducted

    said = merged(flags, config)
    if said.pop("agent") is not None or said.pop("command") is not None:
        raise BadInput("predictions are graded without an agent", hint="leave out `--agent` and `--command`")
    options = grading.narrowed(predictions, suite, said)  # type: ignore[arg-type]
    prepared = api.prepare(suite, grading.agent_of(predictions), out, options)

    async def work(around: Around) -> Summary:
        summary = await api.start(prepared, around)
        report = grading.report(prepared.path, suite)
        write_private(prepared.path / "report.json", _pretty(report))
        if json:
            console.data(report)
        return summary

    return conducted(work, json=False, quiet=quiet)


def _pretty(report: dict[str, object]) -> bytes:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(report), indent=4)
