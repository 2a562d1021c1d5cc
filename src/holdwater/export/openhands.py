"""Exports a run in the format of the OpenHands benchmarks: `output.jsonl`, one row per instance, and reports.

A row with a grade or a patch is in `output.jsonl`, also after a failure, so that it is scored; other rows are
in `output_errors.jsonl`. Rows are written event by event. The tools belong to an arbitrary agent: every call
and result therefore uses the action and observation kind that the SDK has for unknown tools.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..conversation.trajectory import Turn, read_thread_turns
from ..core.config import CriticKind
from ..core.records import ModelUsage
from ..dialect.message import MOST_OPEN_CALLS, CommonMessage, MessageMedia, ToolCall
from ..ledger.attempt_files import read_answer_json
from ..ledger.blobs import BlobStore
from ..ledger.durable_files import open_atomic_file, write_json
from ..ledger.reader import LedgerReader
from .samples import ExportedSample, ExportOmissions, find_conversation, read_first_samples, read_patch
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
        write_json(into / name, content)


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
        "error": f"{failure.where}: {failure.message}" if failure else None,
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


class OpenHandsEvents:
    """The events of one attempt. Their ids are the same in every export."""

    def __init__(self, session: str, blobs: BlobStore) -> None:
        self._session = session
        self._blobs = blobs
        self._count = 0
        self._calls: dict[str, str] = {}  # call -> its event; bound: MOST_OPEN_CALLS, oldest out

    def render_turns(self, turns: Iterator[Turn]) -> Iterator[dict[str, Any]]:
        for turn in turns:
            for message in turn.new:
                yield from self._render_message(message, turn)
            if turn.reply is not None:
                yield from self._render_message(turn.reply, turn)
            else:
                word = turn.error or f"no reply, status {turn.status}"
                yield self._make_event(
                    "ConversationErrorEvent", "environment", turn, code="model", detail=word
                )

    def _render_message(self, message: CommonMessage, turn: Turn) -> Iterator[dict[str, Any]]:
        if message.role == "system":
            prompt = {"type": "text", "text": message.text}
            yield self._make_event("SystemPromptEvent", "agent", turn, system_prompt=prompt, tools=[])
        elif message.role == "tool" and message.answers in self._calls:
            yield self._make_observation(message, turn)
        elif message.calls:
            yield from self._make_actions(message, turn)
        else:
            yield self._make_message(message, turn)

    def _make_message(self, message: CommonMessage, turn: Turn) -> dict[str, Any]:
        role = message.role if message.role in ("assistant", "tool") else "user"
        source = {"assistant": "agent", "tool": "environment"}.get(role, "user")
        said: dict[str, Any] = {"role": role, "content": self._render_parts(message.parts)}
        if role == "assistant":
            said["reasoning_content"] = message.reasoning or None
        elif role == "tool":
            said |= {"tool_call_id": message.answers or None, "name": message.tool or None}
        response = self._response_id(turn) if role == "assistant" else None
        return self._make_event("MessageEvent", source, turn, llm_message=said, llm_response_id=response)

    def _make_actions(self, message: CommonMessage, turn: Turn) -> Iterator[dict[str, Any]]:
        """Yield an event for each call; the first one carries the text and reasoning before the calls."""
        thought = [
            part for part in self._render_parts(message.parts) if part["type"] == "text" and part["text"]
        ]
        for place, call in enumerate(message.calls):
            event = self._make_event(
                "ActionEvent",
                "agent",
                turn,
                thought=[] if place else thought,
                reasoning_content=None if place else message.reasoning or None,
                action={"kind": "MCPToolAction", "data": call.named_arguments},
                tool_name=call.name,
                tool_call_id=call.id,
                tool_call=_render_call(call, turn),
                llm_response_id=self._response_id(turn),
            )
            self._calls[call.id] = event["id"]
            if len(self._calls) > MOST_OPEN_CALLS:
                del self._calls[next(iter(self._calls))]
            yield event

    def _make_observation(self, message: CommonMessage, turn: Turn) -> dict[str, Any]:
        observation = {
            "kind": "MCPToolObservation",
            "content": self._render_parts(message.parts),
            "is_error": message.failed,
            "tool_name": message.tool,
        }
        return self._make_event(
            "ObservationEvent",
            "environment",
            turn,
            observation=observation,
            tool_name=message.tool,
            tool_call_id=message.answers,
            action_id=self._calls.pop(message.answers),
        )

    def _make_event(self, kind: str, source: str, turn: Turn, **rest: Any) -> dict[str, Any]:
        self._count += 1
        at = datetime.fromtimestamp(turn.started, UTC).isoformat()
        return {
            "kind": kind,
            "id": f"{self._session}-{self._count}",
            "timestamp": at,
            "source": source,
            **rest,
        }

    def _response_id(self, turn: Turn) -> str:
        return f"{self._session}-reply-{turn.number}"

    def _render_parts(self, parts: tuple[str | MessageMedia, ...]) -> list[dict[str, Any]]:
        return [{"type": "text", "text": p} if isinstance(p, str) else self._render_media(p) for p in parts]

    def _render_media(self, media: MessageMedia) -> dict[str, Any]:
        if media.type.partition("/")[0] != "image":
            return {"type": "text", "text": f"[{media.type or 'media'}: {media.url or media.blob}]"}
        if media.url:
            return {"type": "image", "image_urls": [media.url]}
        data = media.data or base64.b64encode(self._blobs.get(media.blob)).decode()
        return {"type": "image", "image_urls": [f"data:{media.type};base64,{data}"]}


def _render_call(call: ToolCall, turn: Turn) -> dict[str, Any]:
    given = call.arguments
    text = given if isinstance(given, str) else _encode({} if given is None else given).decode()
    origin = "responses" if turn.dialect == "responses" else "completion"
    return {"id": call.id, "name": call.name, "arguments": text, "origin": origin}


_encode = msgspec.json.Encoder().encode
