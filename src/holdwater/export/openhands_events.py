"""Renders turns as events of the OpenHands SDK: prompts, messages, actions and observations, one at a time.

The tools belong to an arbitrary agent. Every call and result therefore uses the action and observation kind
that the SDK has for unknown tools. `openhands.py` writes the events.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from ..conversation.trajectory import Turn
from ..ledger.blobs import BlobStore
from ..ledger.message import MOST_OPEN_CALLS, CommonMessage, MessageMedia, ToolCall


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
            given = call.arguments
            event = self._make_event(
                "ActionEvent",
                "agent",
                turn,
                thought=[] if place else thought,
                reasoning_content=None if place else message.reasoning or None,
                action={
                    "kind": "MCPToolAction",
                    "data": given if isinstance(given, dict) else {} if given is None else {"input": given},
                },
                tool_name=call.name,
                tool_call_id=call.id,
                tool_call=_render_call(call, turn),
                llm_response_id=self._response_id(turn),
            )
            self._remember_call(call.id, event["id"])
            yield event

    def _remember_call(self, call: str, event: str) -> None:
        self._calls[call] = event
        if len(self._calls) > MOST_OPEN_CALLS:
            del self._calls[next(iter(self._calls))]

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
        if media.type.partition("/")[0] == "image":
            return {"type": "image", "image_urls": [self._media_url(media)]}
        return {"type": "text", "text": f"[{media.type or 'media'}: {media.url or media.blob}]"}

    def _media_url(self, media: MessageMedia) -> str:
        if media.url:
            return media.url
        data = media.data or base64.b64encode(self._blobs.get(media.blob)).decode()
        return f"data:{media.type};base64,{data}"


def _render_call(call: ToolCall, turn: Turn) -> dict[str, Any]:
    given = call.arguments
    text = given if isinstance(given, str) else _encode({} if given is None else given).decode()
    origin = "responses" if turn.dialect == "responses" else "completion"
    return {"id": call.id, "name": call.name, "arguments": text, "origin": origin}


_encode = msgspec.json.Encoder().encode
