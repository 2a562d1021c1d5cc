"""Renders a conversation as the events of OpenHands' SDK, one at a time.

In a conversation of the SDK's own agent, calls of its tools become actions and observations of the tools' own
kinds (`openhands_tools.py`). All other tools get the kinds that the SDK has for unknown tools.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from ..conversation.trajectory import Turn
from ..dialect.message import MOST_OPEN_CALLS, CommonMessage, MessageMedia, ToolCall
from ..ledger.blobs import BlobStore
from .openhands_tools import (
    ALIASES,
    TOOLS,
    FinishAction,
    ToolAction,
    is_agent_error,
    make_observation,
    make_text,
    parse_action,
    summarize_call,
)

encode_json = msgspec.json.Encoder().encode


class OpenCall(NamedTuple):
    """A call without a result so far."""

    event: str  # the id of its event
    tool: str
    action: ToolAction | None  # None: of no tool of the SDK, or refused
    is_refused: bool  # whether the SDK's agent has no such tool, or refuses the arguments


class OpenHandsEvents:
    """The events of one attempt. Their ids are the same in every export."""

    def __init__(self, session: str, blobs: BlobStore, tools: frozenset[str]) -> None:
        self._session = session
        self._blobs = blobs
        self._tools = tools  # of the SDK's agent; empty: another agent
        self.count = 0
        self._calls: dict[str, OpenCall] = {}  # bound: MOST_OPEN_CALLS, oldest out
        self.is_finished = False  # whether the last action is `finish`

    def render_turns(self, turns: Iterator[Turn]) -> Iterator[dict[str, Any]]:
        last = 0.0
        for turn in turns:
            for message in turn.new:
                yield from self._render_message(message, turn, turn.started)
            end = turn.started + turn.seconds
            if turn.reply is not None:
                yield from self._render_message(turn.reply, turn, end)
            else:
                detail = turn.error or f"no reply, status {turn.status}"
                error = {"code": "model", "detail": detail}
                yield self._make_event("ConversationErrorEvent", "environment", end, error)
            last = end
        for call, opened in list(self._calls.items()):
            if isinstance(opened.action, FinishAction):  # no request follows it that has its result
                yield self._make_result(call, [make_text(opened.action.message)], last, failed=False)

    def _render_message(self, message: CommonMessage, turn: Turn, at: float) -> Iterator[dict[str, Any]]:
        if message.role == "system":
            prompt = {"system_prompt": make_text(message.text), "tools": []}
            yield self._make_event("SystemPromptEvent", "agent", at, prompt)
        elif message.role == "tool" and message.answers in self._calls:
            yield self._make_result(
                message.answers, self._render_parts(message.parts), at, failed=message.failed
            )
        elif message.calls:
            yield from self._make_actions(message, turn, at)
        else:
            yield self._make_message(message, turn, at)

    def _make_message(self, message: CommonMessage, turn: Turn, at: float) -> dict[str, Any]:
        role = message.role if message.role in ("assistant", "tool") else "user"
        source = {"assistant": "agent", "tool": "environment"}.get(role, "user")
        content: dict[str, Any] = {"role": role, "content": self._render_parts(message.parts)}
        if role == "assistant":
            content["reasoning_content"] = message.reasoning or None
        elif role == "tool":
            content |= {"tool_call_id": message.answers or None, "name": message.tool or None}
        response = self._response_id(turn) if role == "assistant" else None
        return self._make_event(
            "MessageEvent", source, at, {"llm_message": content, "llm_response_id": response}
        )

    def _make_actions(self, message: CommonMessage, turn: Turn, at: float) -> Iterator[dict[str, Any]]:
        """Yield an event for each call; the first one carries the text and reasoning before the calls."""
        parts = self._render_parts(message.parts)
        thought = [part for part in parts if part["type"] == "text" and part["text"]]
        for place, call in enumerate(message.calls):
            name, action, is_refused = self._read_call(call)
            content = {
                "thought": [] if place else thought,
                "reasoning_content": None if place else message.reasoning or None,
                "action": _render_action(call, action, is_refused),
                "tool_name": name,
                "tool_call_id": call.id,
                "tool_call": _render_call(name, call, turn),
                "llm_response_id": self._response_id(turn),
            }
            if action is not None:
                content["summary"] = summarize_call(name, call.named_arguments)
            event = self._make_event("ActionEvent", "agent", at, content)
            self._calls[call.id] = OpenCall(event["id"], name, action, is_refused)
            if len(self._calls) > MOST_OPEN_CALLS:
                del self._calls[next(iter(self._calls))]
            self.is_finished = isinstance(action, FinishAction)
            yield event

    def _read_call(self, call: ToolCall) -> tuple[str, ToolAction | None, bool]:
        """Return the tool, the action of a tool of the SDK, and whether the SDK's agent refuses the call."""
        alias = ALIASES.get(call.name, "")
        if call.name in self._tools or alias not in self._tools:
            alias = ""
        name = alias or call.name
        action = parse_action(name, call.arguments) if name in self._tools else None
        is_known = name in self._tools and name not in TOOLS  # a tool of an MCP server, for example
        return name, action, bool(self._tools) and action is None and not is_known

    def _make_result(
        self, call: str, content: list[dict[str, Any]], at: float, *, failed: bool
    ) -> dict[str, Any]:
        """Return the event for a call's result: an error of the agent, or an observation."""
        opened = self._calls.pop(call)
        text = "".join(part.get("text", "") for part in content)
        about = {"tool_name": opened.tool, "tool_call_id": call}
        if opened.is_refused or (self._tools and is_agent_error(text)):
            return self._make_event("AgentErrorEvent", "agent", at, {"error": text, **about})
        if opened.action is not None:
            observation = make_observation(opened.action, content, failed)
        else:
            observation = {
                "kind": "MCPToolObservation",
                "content": content,
                "is_error": failed,
                "tool_name": opened.tool,
            }
        found = {"observation": observation, **about, "action_id": opened.event}
        return self._make_event("ObservationEvent", "environment", at, found)

    def _make_event(self, kind: str, source: str, at: float, content: dict[str, Any]) -> dict[str, Any]:
        self.count += 1
        return {
            "kind": kind,
            "id": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self._session}-{self.count}")),
            "timestamp": datetime.fromtimestamp(at, UTC).isoformat(),
            "source": source,
            **content,
        }

    def _response_id(self, turn: Turn) -> str:
        return f"{self._session}-reply-{turn.number}"

    def _render_parts(self, parts: tuple[str | MessageMedia, ...]) -> list[dict[str, Any]]:
        return [make_text(part) if isinstance(part, str) else self._render_media(part) for part in parts]

    def _render_media(self, media: MessageMedia) -> dict[str, Any]:
        if media.type.partition("/")[0] != "image":
            return make_text(f"[{media.type or 'media'}: {media.url or media.blob}]")
        if media.url:
            return {"type": "image", "image_urls": [media.url]}
        data = media.data or base64.b64encode(self._blobs.get(media.blob)).decode()
        return {"type": "image", "image_urls": [f"data:{media.type};base64,{data}"]}


def _render_action(call: ToolCall, action: ToolAction | None, is_refused: bool) -> Any:
    if action is not None or is_refused:
        return action
    return {"kind": "MCPToolAction", "data": call.named_arguments}


def _render_call(name: str, call: ToolCall, turn: Turn) -> dict[str, Any]:
    arguments = call.arguments
    text = arguments if isinstance(arguments, str) else encode_json(arguments or {}).decode()
    origin = "responses" if turn.dialect == "responses" else "completion"
    return {"id": call.id, "name": name, "arguments": text, "origin": origin}
