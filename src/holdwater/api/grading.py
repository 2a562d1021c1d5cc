"""`grade`: runs existing predictions on a suite that grades patches, and makes the reference's report."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Unpack

import msgspec

from ..agent.baselines import index_predictions
from ..core.authoring import Suite
from ..core.errors import BadInput
from ..core.records import Instance
from ..core.summary import RunSummary
from ..export.swebench import make_swebench_report as report_of
from ..ledger.durable_files import write_private
from ..ledger.reader import LedgerReader
from ..run.setup.options import RunOptions
from ..suite.loader import load as load_suite
from .process import wait
from .runs import prepare, start

GOLD = "gold"
EMPTY = "empty"


def grade(
    predictions: str | Path, suite: str, *, out: str | Path | None = None, **options: Unpack[RunOptions]
) -> RunSummary:
    """Grade predictions (`.jsonl` or `.json`; `gold`: the reference patches) to the end."""
    options = narrow_options(predictions, suite, options)
    return wait(start(prepare(suite, agent_of(predictions), out, options)))


def report(path: str | Path, suite: str | None = None) -> dict[str, Any]:
    """Return the report in the reference's schema; with `suite`, include instances without a prediction."""
    with LedgerReader(path) as reader:
        return report_of(reader, _instance_ids(load_suite(suite)) if suite else ())


def write_report(path: str | Path, suite: str) -> dict[str, Any]:
    """Write the report to `report.json` in the run's directory; return it."""
    found = report(path, suite)
    write_private(Path(path, "report.json"), msgspec.json.format(msgspec.json.encode(found), indent=4))
    return found


def agent_of(predictions: str | Path) -> str:
    return str(predictions) if str(predictions) in (GOLD, EMPTY) else f"predictions:{predictions}"


def narrow_options(predictions: str | Path, suite: str, options: RunOptions) -> RunOptions:
    """Select the predicted instances in the options; raise BadInput if one is not in the suite."""
    if str(predictions) in (GOLD, EMPTY):
        return options
    found = load_suite(suite)
    if found.patch is None:
        raise BadInput(
            f"suite `{found.name}` takes no patches", hint="for example `--suite swebench:rows.jsonl`"
        )
    if found.check is not None:
        found.check()
    path = Path(predictions)
    if path.suffix not in (".jsonl", ".json") or not path.is_file():
        raise BadInput(f"no such predictions file: `{path}`", hint="supported formats: `.jsonl` and `.json`")
    places = index_predictions(path)
    wanted = dict(places)
    total = 0
    for name in _instance_ids(found):
        total += 1
        wanted.pop(name, None)
    if wanted:
        name = next(iter(wanted))
        raise BadInput(f"{wanted[name].label}: no such instance in suite `{found.name}`: `{name[:200]}`")
    if len(places) < total and not options.get("only"):
        options = {**options, "only": [glob.escape(name) for name in places]}
    return options


def _instance_ids(suite: Suite) -> Iterable[str]:
    made = suite.instances()
    if not isinstance(made, Iterable):
        raise BadInput(
            f"the instances of suite `{suite.name}` cannot be listed: they come from an async iterator"
        )
    return (instance.id for instance in made if isinstance(instance, Instance))
