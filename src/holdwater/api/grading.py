"""`grade`: someone's predictions as a run of a suite that takes patches, and the reference's report of it."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Unpack

from ..agent.predictions import index
from ..core.authoring import Suite
from ..core.errors import BadInput
from ..core.records import Instance
from ..core.summary import Summary
from ..ledger.export_swebench import report as report_of
from ..ledger.reader import Reader
from ..run.options import Options
from ..suite.load import load as load_suite
from .around import wait

GOLD = "gold"
EMPTY = "empty"


def grade(
    predictions: str | Path, suite: str, *, out: str | Path | None = None, **options: Unpack[Options]
) -> Summary:
    """Grade predictions (`.jsonl` or `.json`; `gold`: the reference's own patches) to the end."""
    from . import prepare, start

    return wait(start(prepare(suite, agent_of(predictions), out, narrowed(predictions, suite, options)), {}))


def report(path: str | Path, suite: str | None = None) -> dict[str, Any]:
    """The run in the reference's schema; with the suite also what nobody submitted a prediction for."""
    with Reader(path) as reader:
        return report_of(reader, _ids(load_suite(suite)) if suite else ())


def agent_of(predictions: str | Path) -> str:
    return str(predictions) if str(predictions) in (GOLD, EMPTY) else f"predictions:{predictions}"


def narrowed(predictions: str | Path, suite: str, options: Options) -> Options:
    """The options for a run of what there are predictions for; BadInput names one that fits no instance."""
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
        raise BadInput(f"no such file of predictions: `{path}`", hint="`.jsonl` and `.json` are read")
    places = index(path)
    wanted = dict(places)
    total = 0
    for name in _ids(found):
        total += 1
        wanted.pop(name, None)
    if wanted:
        name = next(iter(wanted))
        raise BadInput(f"{wanted[name].told}: no such instance in suite `{found.name}`: `{name[:200]}`")
    if len(places) < total and not options.get("only"):
        options = {**options, "only": [glob.escape(name) for name in places]}
    return options


def _ids(suite: Suite) -> Iterable[str]:
    made = suite.instances()
    if not isinstance(made, Iterable):
        raise BadInput(f"the instances of suite `{suite.name}` come one by one from a loop of its own")
    return (instance.id for instance in made if isinstance(instance, Instance))
