"""Exports trajectories as ATIF v1.8 (Agent Trajectory Interchange Format): a JSON file per attempt and media.

Steps are written one at a time: a step is held only until the results of its tools are known. Side threads
become `subagent_trajectories`. Turns are defined in `conversation/trajectory.py`.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from blake3 import blake3

from ..conversation.trajectory import ExchangeThread, ExchangeTree, Turn, read_thread_turns
from ..core.records import ModelUsage
from ..dialect import find_dialect
from ..dialect.message import CommonMessage, MessageMedia
from ..ledger.blobs import BlobStore
from ..ledger.durable_files import open_atomic_file
from ..ledger.reader import LedgerReader
from ..ledger.rows import AttemptRow
from .samples import ExportOmissions

SCHEMA = "ATIF-v1.8"
MEDIA_FOLDER = "media"
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
AUDIO_TYPES = tuple(f"audio/{kind}" for kind in ("wav", "mpeg", "mp4", "aac", "ogg", "flac", "webm", "aiff"))
TYPE_ALIASES = {"image/jpg": "image/jpeg", "audio/mp3": "audio/mpeg", "audio/x-wav": "audio/wav"}


def write_trajectories(reader: LedgerReader, into: Path, omitted: ExportOmissions) -> int:
    """Write a file to `into`, atomically, for each attempt with a conversation; return their number."""
    written = 0
    for row in reader.attempts():
        if omitted.omits(row.attempt):
            continue
        tree = ExchangeTree(reader.directory, row.attempt)
        if tree.has_trajectory:
            write_trajectory(into / f"{row.attempt:06d}-{slug(row.instance)}.json", reader, row, tree)
            written += 1
    return written


def slug(name: str) -> str:
    """Return the characters of an id that are safe in a file name: an id is untrusted data."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:80].strip(".-") or "instance"


def write_trajectory(path: Path, reader: LedgerReader, row: AttemptRow, tree: ExchangeTree) -> None:
    """Write the file of one attempt, and its media next to it."""
    with open_atomic_file(path) as out:
        (path.parent / MEDIA_FOLDER).mkdir(exist_ok=True)
        _AtifWriter(reader, row, tree, path.parent, out).write()


class _AtifWriter:
    """Writes the file of one attempt."""

    def __init__(
        self, reader: LedgerReader, row: AttemptRow, tree: ExchangeTree, into: Path, out: BinaryIO
    ) -> None:
        self._config = reader.config
        self._row = row
        self._tree = tree
        self._media_folder = MediaFolder(into, tree.blobs)
        self._out = out

    def write(self) -> None:
        main, *others = self._tree.threads()
        self._write_thread(main, self._describe_attempt())
        if others:
            self._out.write(b',"subagent_trajectories":[')
            for place, thread in enumerate(others):
                self._out.write(b"," if place else b"")
                self._write_thread(thread, None)
                self._out.write(b"}")
            self._out.write(b"]")
        self._out.write(b"}\n")

    def _describe_attempt(self) -> dict[str, Any]:
        row, verdict = self._row, self._row.verdict
        grade = verdict.grade if verdict else None
        return {
            "run": self._config.id,
            "suite": self._config.suite,
            "instance": row.instance,
            "sample": row.sample,
            "attempt": row.number,
            "kind": row.kind,
            "passed": grade.passed if grade else None,
            "score": grade.score if grade else None,
        }

    def _write_thread(self, thread: ExchangeThread, about: dict[str, Any] | None) -> None:
        """Write a JSON object without its closing brace."""
        session = f"{self._config.id}-{self._row.attempt}"
        first = thread.numbers[0]
        tools = find_dialect(self._tree.exchange(first).dialect).parse_tools(self._tree.head(first))
        start = {
            "schema_version": SCHEMA,
            "session_id": session,
            "trajectory_id": f"{session}-{thread.place}" if thread.place else session,
            "agent": _drop_none(
                name=self._config.agent.rpartition("/")[2] or self._config.agent,
                version=self._config.version,
                model_name=self._config.model,
                tool_definitions=list(tools) or None,
            ),
            **({"extra": about} if about else {}),
        }
        self._out.write(_encode(start)[:-1] + b',"steps":[')
        steps = AtifSteps(self._media_folder)
        for step in steps.render_turns(read_thread_turns(self._tree, thread)):
            self._out.write((b"," if step["step_id"] > 1 else b"") + _encode(step))
        self._out.write(b'],"final_metrics":%s' % _encode(steps.final_metrics()))


class AtifSteps:
    """Renders turns as steps. The agent's last step is held until the results of its tools are known."""

    def __init__(self, gallery: MediaFolder) -> None:
        self._media_folder = gallery
        self._count = 0
        self._usage = ModelUsage()
        self._pending_step: dict[str, Any] | None = None

    def render_turns(self, turns: Iterator[Turn]) -> Iterator[dict[str, Any]]:
        for turn in turns:
            self._usage = self._usage.plus(turn.usage)
            for message in turn.new:
                yield from self._add_message(message, turn)
            yield from self._release_pending()
            yield from self._add_reply(turn)
        yield from self._release_pending()

    def final_metrics(self) -> dict[str, Any]:
        """Return the metrics of all steps rendered so far."""
        return _drop_none(
            total_prompt_tokens=self._usage.input_tokens,
            total_completion_tokens=self._usage.output_tokens,
            total_cached_tokens=self._usage.cached_tokens,
            total_cost_usd=self._usage.cost,
            total_steps=self._count,
        )

    def _add_message(self, message: CommonMessage, turn: Turn) -> Iterator[dict[str, Any]]:
        if message.role == "tool":
            if self._pending_step is None:  # a result without a call: an event of the system
                self._pending_step = self._make_step("system", turn, message="")
            results = self._pending_step.setdefault("observation", {"results": []})["results"]
            results.append(self._render_result(message, self._pending_step))
            return
        yield from self._release_pending()
        content = self._media_folder.render_parts(message.parts)
        if message.role == "assistant":  # written by the client, not by the model
            self._pending_step = self._make_step(
                "agent", turn, message=content, **_render_calls(message), llm_call_count=0
            )
        else:
            source = "system" if message.role == "system" else "user"
            yield self._make_step(source, turn, message=content)

    def _add_reply(self, turn: Turn) -> Iterator[dict[str, Any]]:
        if turn.reply is None:
            word = turn.error or f"no reply, status {turn.status}"
            yield self._make_step("system", turn, message=f"the model call failed: {word}")
            return
        reply = turn.reply
        self._pending_step = self._make_step(
            "agent",
            turn,
            message=self._media_folder.render_parts(reply.parts),
            **_drop_none(model_name=turn.model or None, reasoning_content=reply.reasoning or None),
            **_render_calls(reply),
            metrics=_render_metrics(turn),
            llm_call_count=1,
        )

    def _release_pending(self) -> Iterator[dict[str, Any]]:
        held, self._pending_step = self._pending_step, None
        if held is not None:
            yield held

    def _make_step(self, source: str, turn: Turn, **rest: Any) -> dict[str, Any]:
        self._count += 1
        extra = _drop_none(
            exchange=turn.number,
            finish=turn.finish if "metrics" in rest else None,
            seconds=turn.seconds if "metrics" in rest else None,
            status=turn.status if turn.error else None,
            error=turn.error or None,
        )
        at = datetime.fromtimestamp(turn.started, UTC).isoformat()
        return {"step_id": self._count, "timestamp": at, "source": source, **rest, "extra": extra}

    def _render_result(self, message: CommonMessage, step: dict[str, Any]) -> dict[str, Any]:
        """Return a tool result. It names its call only if this step made the call, as ATIF requires."""
        called = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        known = message.answers in called
        extra = _drop_none(
            tool_call_id=message.answers if message.answers and not known else None,
            failed=message.failed or None,
        )
        return _drop_none(
            source_call_id=message.answers if known else None,
            content=self._media_folder.render_parts(message.parts),
            extra=extra or None,
        )


def _render_calls(message: CommonMessage) -> dict[str, Any]:
    calls = [
        {"tool_call_id": call.id, "function_name": call.name, "arguments": call.named_arguments}
        for call in message.calls
    ]
    return {"tool_calls": calls} if calls else {}


def _render_metrics(turn: Turn) -> dict[str, Any]:
    usage, tokens = turn.usage, turn.tokens
    return _drop_none(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        extra={"reasoning_tokens": usage.reasoning_tokens} if usage.reasoning_tokens else None,
        cost_usd=usage.cost,
        prompt_token_ids=tokens.prompt or None,
        completion_token_ids=tokens.completion or None,
        logprobs=None if None in tokens.logprobs else tokens.logprobs or None,
    )


class MediaFolder:
    """Writes media as files next to the trajectories, each once, named by the hash of its content."""

    def __init__(self, into: Path, blobs: BlobStore) -> None:
        self._into = into
        self._blobs = blobs

    def render_parts(self, parts: tuple[str | MessageMedia, ...]) -> str | list[dict[str, Any]]:
        """Return a text, or a list of parts if there are media."""
        if all(isinstance(part, str) for part in parts):
            return "\n\n".join(str(part) for part in parts)
        return [{"type": "text", "text": p} if isinstance(p, str) else self._render_media(p) for p in parts]

    def _render_media(self, media: MessageMedia) -> dict[str, Any]:
        path = media.url if media.url else self._store_file(media)
        type_ = TYPE_ALIASES.get(media.type, media.type)
        if "/" not in type_ and media.url:
            type_ = mimetypes.guess_type(media.url.partition("?")[0])[0] or type_
        if type_ in IMAGE_TYPES + AUDIO_TYPES:
            return {"type": type_.partition("/")[0], "source": {"media_type": type_, "path": path}}
        return {"type": "text", "text": f"[{type_ or 'media'}: {path}]"}  # ATIF has no other kinds

    def _store_file(self, media: MessageMedia) -> str:
        """Store media as a file; return its path relative to the trajectory's directory."""
        if media.blob:
            name, content = media.blob, None
        else:
            content = _decode_base64(media.data)
            name = blake3(content).hexdigest()
        file = f"{MEDIA_FOLDER}/{name}{mimetypes.guess_extension(media.type) or ''}"
        path = self._into / file
        if not path.exists():
            new = path.with_name(f".{path.name}.new")
            new.write_bytes(self._blobs.get(name) if content is None else content)
            new.replace(path)
        return file


def _decode_base64(data: str) -> bytes:
    try:
        return base64.b64decode(data)
    except (binascii.Error, ValueError):
        return data.encode()


def _drop_none(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


_encode = msgspec.json.Encoder().encode
