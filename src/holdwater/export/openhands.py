"""Exports a run in the format of the OpenHands benchmarks: `output.jsonl`, one row per instance, and reports.

Rows are written event by event; `openhands_events.py` renders the events. A row with a grade or a patch is in
`output.jsonl`, also after a failure, so that it is scored; other rows are in `output_errors.jsonl`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..conversation.trajectory import read_thread_turns
from ..core.config import CriticKind
from ..core.records import AttemptFailure, ModelUsage
from ..ledger.attempt_files import read_answer_json
from ..ledger.reader import LedgerReader
from .atomic_output import open_atomic_file
from .omissions import ExportOmissions
from .openhands_events import OpenHandsEvents
from .samples import ExportedSample, find_conversation, read_first_samples, read_patch
from .swebench import make_swebench_report, write_predictions

OUTPUT_NAME = "output.jsonl"
CRITIC_NAMES: dict[str, str] = {
    CriticKind.FINISHED_WITH_PATCH: "AgentFinishedCritic",
    CriticKind.PATCH: "EmptyPatchCritic",
}


def write_openhands(reader: LedgerReader, into: Path, omitted: ExportOmissions) -> None:
    """Write the files to `into`; each replaces an earlier file once it is complete."""
    with (
        open_atomic_file(into / OUTPUT_NAME) as rows,
        open_atomic_file(into / "output_errors.jsonl") as errors,
    ):
        for one in read_first_samples(reader, omitted):
            patch = read_patch(reader, one.verdict)
            _write_row(reader, one, patch, omitted, rows if one.scored or patch else errors)
    with open_atomic_file(into / "output.swebench.jsonl") as predictions:
        omitted.patches = write_predictions(reader, predictions)
    for name, content in (
        ("output.report.json", make_swebench_report(reader)),
        ("metadata.json", _render_metadata(reader, into)),
    ):
        with open_atomic_file(into / name) as file:
            file.write(msgspec.json.format(_encode(content)) + b"\n")


def _write_row(
    reader: LedgerReader, one: ExportedSample, patch: str | None, omitted: ExportOmissions, out: BinaryIO
) -> None:
    """Write one line, event by event."""
    failure = one.verdict.failure
    start = {
        "instance_id": one.outcome.instance,
        "attempt": one.row.round,
        "test_result": _test_result(reader, one, patch),
        "instruction": one.instance.instruction,
        "metadata": None,  # equal for all rows: see `metadata.json`
        "metrics": _render_metrics(reader.config.model or "", one.usage),
        "error": _render_error(failure) if failure else None,
        "instance": one.instance.data,
    }
    out.write(_encode(start)[:-1] + b',"history":[')
    _write_history(reader, one.row.attempt, omitted, out)
    out.write(b'],"runtime_runs":[')
    _write_runs(reader, one, out)
    out.write(b"]}\n")


def _write_history(reader: LedgerReader, attempt: int, omitted: ExportOmissions, out: BinaryIO) -> None:
    tree = find_conversation(reader, attempt, omitted)
    if tree is None:
        return
    events = OpenHandsEvents(f"{reader.config.id}-{tree.attempt}", tree.blobs)
    for place, event in enumerate(events.render_turns(read_thread_turns(tree, tree.threads()[0]))):
        out.write((b"," if place else b"") + _encode(event))


def _write_runs(reader: LedgerReader, one: ExportedSample, out: BinaryIO) -> None:
    """Write every attempt at the sample, with its resource factor, round and retry number."""
    separator, tries = b"", 0
    before = 0
    for row in reader.attempts(one.row.row):
        if row.sample != one.row.sample or row.regrades is not None:
            continue
        tries, before = (tries + 1 if row.round == before else 1), row.round
        run = {
            "runtime_id": f"{reader.config.id}-{row.attempt}",
            "resource_factor": row.scale,
            "critic_attempt": row.round,
            "retry": tries,
            "started_at": datetime.fromtimestamp(row.started, UTC),
        }
        out.write(separator + _encode(run))
        separator = b","


def _test_result(reader: LedgerReader, one: ExportedSample, patch: str | None) -> dict[str, Any]:
    grade = one.verdict.grade
    result: dict[str, Any] = {"git_patch": patch or ""}
    if patch is not None and one.verdict.failure is not None:
        result["git_patch_captured_on_error"] = True
    if grade is not None:
        result |= msgspec.structs.asdict(grade)
    if (answer := read_answer_json(reader.directory, one.verdict)) is not None:
        result["answer"] = msgspec.Raw(answer.encode())
    return {**result, "outcome": one.outcome.kind}


def _render_metrics(model: str, usage: ModelUsage) -> dict[str, Any]:
    return {
        "model_name": model or "default",
        "accumulated_cost": usage.nanodollars / 1e9,
        "accumulated_token_usage": {
            "model": model,
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "cache_read_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.written_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
        },
    }


def _render_error(failure: AttemptFailure) -> str:
    return f"{failure.where}: {failure.message}"


def _render_metadata(reader: LedgerReader, into: Path) -> dict[str, Any]:
    config = reader.config
    return {
        "llm": {"model": config.model or "none", "usage_id": "agent"},
        "dataset": config.suite,
        "dataset_split": "test",
        "max_iterations": config.limits.requests or 0,
        "eval_output_dir": str(into),
        "eval_limit": config.limit or 0,
        "n_critic_runs": config.attempts,
        "critic": {"kind": CRITIC_NAMES.get(config.critic, "PassCritic")},
        "max_retries": config.retries,
        "details": {
            "run": config.id,
            "agent": config.agent,
            "critic": config.critic,
            "samples": config.samples,
            "holdwater": config.version,
        },
    }


_encode = msgspec.json.Encoder().encode
