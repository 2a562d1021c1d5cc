"""Trajectories as ATIF v1.8 (Agent Trajectory Interchange Format): a JSON file an attempt, media as files.

Written step by step: a step waits for what its tools answer, and no longer. Threads beside the trajectory are
its `subagent_trajectories`. What a turn is, is in `trajectory.py`.
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

from ..core.records import Usage
from . import dialects
from .blobs import Blobs
from .message import Media, Message, ToolCall
from .omitted import Omitted
from .reader import AttemptRow, Reader
from .trajectory import Thread, Tree, Turn, thread_turns
from .whole import whole_file

SCHEMA = "ATIF-v1.8"
MEDIA = "media"
IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
SOUNDS = tuple(f"audio/{kind}" for kind in ("wav", "mpeg", "mp4", "aac", "ogg", "flac", "webm", "aiff"))
ALIASES = {"image/jpg": "image/jpeg", "audio/mp3": "audio/mpeg", "audio/x-wav": "audio/wav"}


def write_trajectories(reader: Reader, into: Path, omitted: Omitted) -> int:
    """A file in `into` for each attempt that talked to its model; how many. Each is whole or absent."""
    written = 0
    for row in reader.attempts():
        if omitted.omits(row.attempt):
            continue
        tree = Tree(reader.directory, row.attempt)
        if tree.has_trajectory:
            write_trajectory(into / f"{row.attempt:06d}-{slug(row.instance)}.json", reader, row, tree)
            written += 1
    return written


def slug(name: str) -> str:
    """An id is data: of it, what can stand in a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:80].strip(".-") or "instance"


def write_trajectory(path: Path, reader: Reader, row: AttemptRow, tree: Tree) -> None:
    """One attempt's file, and its media beside it."""
    with whole_file(path) as out:
        (path.parent / MEDIA).mkdir(exist_ok=True)
        _Writer(reader, row, tree, path.parent, out).write()


class _Writer:
    """One attempt's file."""

    def __init__(self, reader: Reader, row: AttemptRow, tree: Tree, into: Path, out: BinaryIO) -> None:
        self._config = reader.config
        self._row = row
        self._tree = tree
        self._gallery = Gallery(into, tree.blobs)
        self._out = out

    def write(self) -> None:
        main, *others = self._tree.threads()
        self._write_thread(main, self._about())
        if others:
            self._out.write(b',"subagent_trajectories":[')
            for place, thread in enumerate(others):
                self._out.write(b"," if place else b"")
                self._write_thread(thread, None)
                self._out.write(b"}")
            self._out.write(b"]")
        self._out.write(b"}\n")

    def _about(self) -> dict[str, Any]:
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

    def _write_thread(self, thread: Thread, about: dict[str, Any] | None) -> None:
        """An object without its closing bracket."""
        session = f"{self._config.id}-{self._row.attempt}"
        first = thread.numbers[0]
        tools = dialects.dialect(self._tree.exchange(first).dialect).tools(self._tree.head(first))
        start = {
            "schema_version": SCHEMA,
            "session_id": session,
            "trajectory_id": f"{session}-{thread.place}" if thread.place else session,
            "agent": _present(
                name=self._config.agent.rpartition("/")[2] or self._config.agent,
                version=self._config.version,
                model_name=self._config.model,
                tool_definitions=list(tools) or None,
            ),
            **({"extra": about} if about else {}),
        }
        self._out.write(_encode(start)[:-1] + b',"steps":[')
        steps = Steps(self._gallery)
        for step in steps.of(thread_turns(self._tree, thread)):
            self._out.write((b"," if step["step_id"] > 1 else b"") + _encode(step))
        self._out.write(b'],"final_metrics":%s' % _encode(steps.final()))


class Steps:
    """Turns as steps. The agent's last step is held until it is known what its tools answered."""

    def __init__(self, gallery: Gallery) -> None:
        self._gallery = gallery
        self._count = 0
        self._usage = Usage()
        self._held: dict[str, Any] | None = None

    def of(self, turns: Iterator[Turn]) -> Iterator[dict[str, Any]]:
        for turn in turns:
            self._usage = self._usage.plus(turn.usage)
            for message in turn.new:
                yield from self._take(message, turn)
            yield from self._release()
            yield from self._answer(turn)
        yield from self._release()

    def final(self) -> dict[str, Any]:
        """The metrics of all that was made."""
        return _present(
            total_prompt_tokens=self._usage.input_tokens,
            total_completion_tokens=self._usage.output_tokens,
            total_cached_tokens=self._usage.cached_tokens,
            total_cost_usd=self._usage.cost,
            total_steps=self._count,
        )

    def _take(self, message: Message, turn: Turn) -> Iterator[dict[str, Any]]:
        if message.role == "tool":
            if self._held is None:  # nobody called: an event of the system's
                self._held = self._step("system", turn, message="")
            results = self._held.setdefault("observation", {"results": []})["results"]
            results.append(self._result(message, self._held))
            return
        yield from self._release()
        content = self._gallery.content(message.parts)
        if message.role == "assistant":  # words that the client puts into the model's mouth
            self._held = self._step("agent", turn, message=content, **_acts(message), llm_call_count=0)
        else:
            source = "system" if message.role == "system" else "user"
            yield self._step(source, turn, message=content)

    def _answer(self, turn: Turn) -> Iterator[dict[str, Any]]:
        if turn.reply is None:
            word = turn.error or f"no reply, status {turn.status}"
            yield self._step("system", turn, message=f"the model call failed: {word}")
            return
        reply = turn.reply
        self._held = self._step(
            "agent",
            turn,
            message=self._gallery.content(reply.parts),
            **_present(model_name=turn.model or None, reasoning_content=reply.reasoning or None),
            **_acts(reply),
            metrics=_metrics(turn),
            llm_call_count=1,
        )

    def _release(self) -> Iterator[dict[str, Any]]:
        held, self._held = self._held, None
        if held is not None:
            yield held

    def _step(self, source: str, turn: Turn, **rest: Any) -> dict[str, Any]:
        self._count += 1
        extra = _present(
            exchange=turn.number,
            finish=turn.finish if "metrics" in rest else None,
            seconds=turn.seconds if "metrics" in rest else None,
            status=turn.status if turn.error else None,
            error=turn.error or None,
        )
        at = datetime.fromtimestamp(turn.started, UTC).isoformat()
        return {"step_id": self._count, "timestamp": at, "source": source, **rest, "extra": extra}

    def _result(self, message: Message, step: dict[str, Any]) -> dict[str, Any]:
        """An answer names the call only where the step made it; ATIF allows nothing else."""
        called = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        known = message.answers in called
        extra = _present(
            tool_call_id=message.answers if message.answers and not known else None,
            failed=message.failed or None,
        )
        return _present(
            source_call_id=message.answers if known else None,
            content=self._gallery.content(message.parts),
            extra=extra or None,
        )


def _acts(message: Message) -> dict[str, Any]:
    return {"tool_calls": [_call(call) for call in message.calls]} if message.calls else {}


def _call(call: ToolCall) -> dict[str, Any]:
    given = call.arguments
    made = given if isinstance(given, dict) else {} if given is None else {"input": given}
    return {"tool_call_id": call.id, "function_name": call.name, "arguments": made}


def _metrics(turn: Turn) -> dict[str, Any]:
    usage, tokens = turn.usage, turn.tokens
    return _present(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        extra={"reasoning_tokens": usage.reasoning_tokens} if usage.reasoning_tokens else None,
        cost_usd=usage.cost,
        prompt_token_ids=tokens.prompt or None,
        completion_token_ids=tokens.completion or None,
        logprobs=None if None in tokens.logprobs else tokens.logprobs or None,
    )


class Gallery:
    """Media as files beside the trajectories, each once, under the hash of its content."""

    def __init__(self, into: Path, blobs: Blobs) -> None:
        self._into = into
        self._blobs = blobs

    def content(self, parts: tuple[str | Media, ...]) -> str | list[dict[str, Any]]:
        """A text, or parts where there are media."""
        if all(isinstance(part, str) for part in parts):
            return "\n\n".join(str(part) for part in parts)
        return [{"type": "text", "text": p} if isinstance(p, str) else self._part(p) for p in parts]

    def _part(self, media: Media) -> dict[str, Any]:
        path = media.url if media.url else self._kept(media)
        type_ = ALIASES.get(media.type, media.type)
        if "/" not in type_ and media.url:
            type_ = mimetypes.guess_type(media.url.partition("?")[0])[0] or type_
        if type_ in IMAGES + SOUNDS:
            return {"type": type_.partition("/")[0], "source": {"media_type": type_, "path": path}}
        return {"type": "text", "text": f"[{type_ or 'media'}: {path}]"}  # ATIF has no other kinds

    def _kept(self, media: Media) -> str:
        """The path of the file, relative to the trajectory's."""
        if media.blob:
            name, content = media.blob, None
        else:
            content = _bytes(media.data)
            name = blake3(content).hexdigest()
        file = f"{MEDIA}/{name}{mimetypes.guess_extension(media.type) or ''}"
        path = self._into / file
        if not path.exists():
            new = path.with_name(f".{path.name}.new")
            new.write_bytes(self._blobs.get(name) if content is None else content)
            new.replace(path)
        return file


def _bytes(data: str) -> bytes:
    try:
        return base64.b64decode(data)
    except (binascii.Error, ValueError):
        return data.encode()


def _present(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


_encode = msgspec.json.Encoder().encode
