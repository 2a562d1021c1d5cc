"""Exports a run in the formats of SWE-bench: predictions as lines, and the report of the whole run.

Only the first sample of an instance is exported: these formats have no samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import msgspec

from ..core.failures import NOT_SUBMITTED
from ..core.policy import explain_not_kept
from ..core.records import Verdict
from ..ledger.attempt_files import read_answer_json
from ..ledger.reader import LedgerReader
from ..ledger.rows import OutcomeRow
from .samples import patch_file

SCHEMA = 2
COUNTED_KINDS = (
    "completed",
    "resolved",
    "unresolved",
    "infra_failure",
    "ambiguous_failure",
    "empty_patch",
    "error",
)
LISTED_KINDS = (
    *("completed", "incomplete", "empty_patch", "submitted", "resolved", "unresolved"),
    *("infra_failure", "ambiguous_failure", "error"),
)


def write_predictions(reader: LedgerReader, out: BinaryIO) -> str:
    """Write a line for each settled instance with a patch; return a sentence about omitted patches."""
    unkept = 0
    keep = ""
    for row, verdict in _read_settled(reader):
        if verdict.patch is None or _not_submitted(verdict):
            continue
        path = patch_file(reader.directory, verdict)
        if (dropped := reader.find_drop_policy(row.attempt)) is not None:
            unkept, keep = unkept + 1, dropped
            continue
        line = {
            "instance_id": row.instance,
            "model_name_or_path": _find_model(reader, verdict),
            "model_patch": path.read_bytes().decode("utf-8", "replace"),
        }
        out.write(msgspec.json.encode(line) + b"\n")
    return f"left out: the patches of {unkept} instances are {explain_not_kept(keep)}" if unkept else ""


def count_patchless(reader: LedgerReader) -> int:
    """Return the number of settled instances without a patch: the suite takes none, or they failed before."""
    return sum(verdict.patch is None and not _not_submitted(verdict) for _, verdict in _read_settled(reader))


def make_swebench_report(reader: LedgerReader, dataset: Iterable[str] = ()) -> dict[str, Any]:
    """Return the report in SWE-bench's format; `dataset` are further ids of the dataset, planned or not."""
    found: dict[str, set[str]] = {name: set() for name in LISTED_KINDS}
    reasons: dict[str, str] = {}
    for row, verdict in _read_settled(reader):
        for name in _list_kinds(row, verdict):
            found[name].add(row.instance)
        if (reason := _find_reason(row, verdict)) is not None:
            reasons[row.instance] = reason
    everything = {row.name for row in reader.instances()} | set(dataset)
    found["incomplete"] = everything - found["submitted"]
    return {
        "total_instances": len(everything),
        "submitted_instances": len(found["submitted"]),
        **{f"{name}_instances": len(found[name]) for name in COUNTED_KINDS},
        **{f"{name}_ids": sorted(found[name]) for name in LISTED_KINDS},
        "failure_reasons": dict(sorted(reasons.items())),
        "schema_version": SCHEMA,
    }


def _read_settled(reader: LedgerReader) -> Iterator[tuple[OutcomeRow, Verdict]]:
    for row in reader.outcomes():
        verdict = reader.verdict(row.attempt) if row.sample == 0 else None
        if verdict is not None:
            yield row, verdict


def _list_kinds(row: OutcomeRow, verdict: Verdict) -> Iterator[str]:
    """Yield the lists of the report that an instance belongs to."""
    if _not_submitted(verdict):
        return
    yield "submitted"
    metrics = verdict.grade.metrics if verdict.grade else {}
    if "empty_patch" in metrics:
        yield "empty_patch"
        return
    if verdict.grade is None or row.score is None:  # not graded: an infrastructure failure
        yield from ("error", "infra_failure")
        return
    yield from {key.partition(".")[0] for key in metrics} & {"infra_failure", "ambiguous_failure"}
    if "error" in metrics:
        yield "error"
        return
    yield "completed"
    yield "resolved" if verdict.grade.passed else "unresolved"


def _find_reason(row: OutcomeRow, verdict: Verdict) -> str | None:
    for key in verdict.grade.metrics if verdict.grade else ():
        kind, _, reason = key.partition(".")
        if kind in ("infra_failure", "ambiguous_failure"):
            return reason
    failed = verdict.failure is not None and row.score is None and not _not_submitted(verdict)
    return f"{verdict.failure.where}.{verdict.failure.kind}" if failed and verdict.failure else None


def _not_submitted(verdict: Verdict) -> bool:
    return verdict.failure is not None and verdict.failure.kind == NOT_SUBMITTED


def _find_model(reader: LedgerReader, verdict: Verdict) -> str:
    """Return the author of a patch: the name in the answer, the run's model, or its agent."""
    text = read_answer_json(reader.directory, verdict)
    answer = msgspec.json.decode(text) if text else None
    named = answer.get("model_name_or_path") if isinstance(answer, dict) else None
    return named if isinstance(named, str) and named else reader.config.model or reader.config.agent
