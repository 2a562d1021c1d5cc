"""A run in SWE-bench's own formats: predictions, a line each, and the report of the whole run.

Of an instance with several samples the first one counts: these formats know of no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import msgspec

from ..core.failures import NOT_SUBMITTED
from ..core.policy import not_kept
from ..core.records import Verdict
from .chosen import patch_file
from .files import answer_json
from .reader import OutcomeRow, Reader

SCHEMA = 2
COUNTED = (
    "completed",
    "resolved",
    "unresolved",
    "infra_failure",
    "ambiguous_failure",
    "empty_patch",
    "error",
)
LISTED = (
    *("completed", "incomplete", "empty_patch", "submitted", "resolved", "unresolved"),
    *("infra_failure", "ambiguous_failure", "error"),
)


def write_predictions(reader: Reader, out: BinaryIO) -> str:
    """A line for each settled instance that has a patch; what is left out, in words."""
    unkept = 0
    keep = ""
    for row, verdict in _settled(reader):
        if verdict.patch is None or _not_submitted(verdict):
            continue
        path = patch_file(reader.directory, verdict)
        if (dropped := reader.dropped(row.attempt)) is not None:
            unkept, keep = unkept + 1, dropped
            continue
        line = {
            "instance_id": row.instance,
            "model_name_or_path": _model(reader, verdict),
            "model_patch": path.read_bytes().decode("utf-8", "replace"),
        }
        out.write(msgspec.json.encode(line) + b"\n")
    return f"left out: the patches of {unkept} instances are {not_kept(keep)}" if unkept else ""


def count_patchless(reader: Reader) -> int:
    """Settled instances of which there is no patch: their suite takes none, or they failed before that."""
    return sum(verdict.patch is None and not _not_submitted(verdict) for _, verdict in _settled(reader))


def report(reader: Reader, dataset: Iterable[str] = ()) -> dict[str, Any]:
    """The reference's report of a run; `dataset` are ids that belong to it, planned or not."""
    found: dict[str, set[str]] = {name: set() for name in LISTED}
    reasons: dict[str, str] = {}
    for row, verdict in _settled(reader):
        for name in _kinds(row, verdict):
            found[name].add(row.instance)
        if (reason := _reason(row, verdict)) is not None:
            reasons[row.instance] = reason
    everything = {row.name for row in reader.instances()} | set(dataset)
    found["incomplete"] = everything - found["submitted"]
    return {
        "total_instances": len(everything),
        "submitted_instances": len(found["submitted"]),
        **{f"{name}_instances": len(found[name]) for name in COUNTED},
        **{f"{name}_ids": sorted(found[name]) for name in LISTED},
        "failure_reasons": dict(sorted(reasons.items())),
        "schema_version": SCHEMA,
    }


def _settled(reader: Reader) -> Iterator[tuple[OutcomeRow, Verdict]]:
    for row in reader.outcomes():
        verdict = reader.verdict(row.attempt) if row.sample == 0 else None
        if verdict is not None:
            yield row, verdict


def _kinds(row: OutcomeRow, verdict: Verdict) -> Iterator[str]:
    """The lists of the report that an instance belongs to."""
    if _not_submitted(verdict):
        return
    yield "submitted"
    metrics = verdict.grade.metrics if verdict.grade else {}
    if "empty_patch" in metrics:
        yield "empty_patch"
        return
    if verdict.grade is None or row.score is None:  # it could not be graded: the infrastructure's failure
        yield from ("error", "infra_failure")
        return
    yield from {key.partition(".")[0] for key in metrics} & {"infra_failure", "ambiguous_failure"}
    if "error" in metrics:
        yield "error"
        return
    yield "completed"
    yield "resolved" if verdict.grade.passed else "unresolved"


def _reason(row: OutcomeRow, verdict: Verdict) -> str | None:
    for key in verdict.grade.metrics if verdict.grade else ():
        kind, _, reason = key.partition(".")
        if kind in ("infra_failure", "ambiguous_failure"):
            return reason
    failed = verdict.failure is not None and row.score is None and not _not_submitted(verdict)
    return f"{verdict.failure.where}.{verdict.failure.kind}" if failed and verdict.failure else None


def _not_submitted(verdict: Verdict) -> bool:
    return verdict.failure is not None and verdict.failure.kind == NOT_SUBMITTED


def _model(reader: Reader, verdict: Verdict) -> str:
    """Whose patch it is: what the answer says, the run's model, or its agent."""
    text = answer_json(reader.directory, verdict)
    answer = msgspec.json.decode(text) if text else None
    named = answer.get("model_name_or_path") if isinstance(answer, dict) else None
    return named if isinstance(named, str) and named else reader.config.model or reader.config.agent
