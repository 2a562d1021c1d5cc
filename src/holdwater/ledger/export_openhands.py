"""A run as OpenHands' benchmarks write one: `output.jsonl` with a row an instance, and what lies beside it.

Rows are written event by event; `openhands_events.py` makes the events. A row whose work could be had is in
`output.jsonl`, whatever ended it, so that it is scored; the others are in `output_errors.jsonl`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..core.config import Critic
from ..core.records import Failure, Usage
from .chosen import Chosen, conversation, first_samples, patch_of
from .export_swebench import report, write_predictions
from .files import answer_json
from .omitted import Omitted
from .openhands_events import Events
from .reader import Reader
from .trajectory import thread_turns
from .whole import whole_file

OUTPUT = "output.jsonl"
CRITICS: dict[str, str] = {
    Critic.FINISHED_WITH_PATCH: "AgentFinishedCritic",
    Critic.PATCH: "EmptyPatchCritic",
}


def write_openhands(reader: Reader, into: Path, omitted: Omitted) -> None:
    """Write the files to `into`; each takes the place of an earlier one when it is whole."""
    with whole_file(into / OUTPUT) as rows, whole_file(into / "output_errors.jsonl") as errors:
        for one in first_samples(reader, omitted):
            patch = patch_of(reader, one.verdict)
            _write_row(reader, one, patch, omitted, rows if one.scored or patch else errors)
    with whole_file(into / "output.swebench.jsonl") as predictions:
        omitted.patches = write_predictions(reader, predictions)
    for name, content in (
        ("output.report.json", report(reader)),
        ("metadata.json", _metadata(reader, into)),
    ):
        with whole_file(into / name) as file:
            file.write(msgspec.json.format(_encode(content)) + b"\n")


def _write_row(reader: Reader, one: Chosen, patch: str | None, omitted: Omitted, out: BinaryIO) -> None:
    """One line, event by event."""
    failure = one.verdict.failure
    start = {
        "instance_id": one.outcome.instance,
        "attempt": one.row.round,
        "test_result": _test_result(reader, one, patch),
        "instruction": one.instance.instruction,
        "metadata": None,  # the same for all: it is in `metadata.json`
        "metrics": _metrics(reader.config.model or "", one.usage),
        "error": _error(failure) if failure else None,
        "instance": one.instance.data,
    }
    out.write(_encode(start)[:-1] + b',"history":[')
    _write_history(reader, one.row.attempt, omitted, out)
    out.write(b'],"runtime_runs":[')
    _write_runs(reader, one, out)
    out.write(b"]}\n")


def _write_history(reader: Reader, attempt: int, omitted: Omitted, out: BinaryIO) -> None:
    tree = conversation(reader, attempt, omitted)
    if tree is None:
        return
    events = Events(f"{reader.config.id}-{tree.attempt}", tree.blobs)
    for place, event in enumerate(events.of(thread_turns(tree, tree.threads()[0]))):
        out.write((b"," if place else b"") + _encode(event))


def _write_runs(reader: Reader, one: Chosen, out: BinaryIO) -> None:
    """Every attempt at the sample, with what it was given."""
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


def _test_result(reader: Reader, one: Chosen, patch: str | None) -> dict[str, Any]:
    grade = one.verdict.grade
    result: dict[str, Any] = {"git_patch": patch or ""}
    if patch is not None and one.verdict.failure is not None:
        result["git_patch_captured_on_error"] = True
    if grade is not None:
        result |= msgspec.structs.asdict(grade)
    if (answer := answer_json(reader.directory, one.verdict)) is not None:
        result["answer"] = msgspec.Raw(answer.encode())
    return {**result, "outcome": one.outcome.kind}


def _metrics(model: str, usage: Usage) -> dict[str, Any]:
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


def _error(failure: Failure) -> str:
    return f"{failure.where}: {failure.message}"


def _metadata(reader: Reader, into: Path) -> dict[str, Any]:
    config = reader.config
    return {
        "llm": {"model": config.model or "none", "usage_id": "agent"},
        "dataset": config.suite,
        "dataset_split": "test",
        "max_iterations": config.limits.requests or 0,
        "eval_output_dir": str(into),
        "eval_limit": config.limit or 0,
        "n_critic_runs": config.attempts,
        "critic": {"kind": CRITICS.get(config.critic, "PassCritic")},
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
