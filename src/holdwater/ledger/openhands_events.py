"""Turns as the events of OpenHands' SDK: prompts, messages, actions and observations, one at a time.

Tools are those of whatever agent ran, so that each call and each answer has the one kind of action and of
observation that the SDK has for tools it does not know. `export_openhands.py` writes them down.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from .blobs import Blobs
from .message import MOST_OPEN, Media, Message, ToolCall
from .trajectory import Turn


class Events:
    """The events of one attempt. Their ids are the same each time they are made."""

    def __init__(self, session: str, blobs: Blobs) -> None:
        self._session = session
        self._blobs = blobs
        self._count = 0
        self._calls: dict[str, str] = {}  # call -> its event; bound: MOST_OPEN, the oldest go first

    def of(self, turns: Iterator[Turn]) -> Iterator[dict[str, Any]]:
        for turn in turns:
            for message in turn.new:
                yield from self._said(message, turn)
            if turn.reply is not None:
                yield from self._said(turn.reply, turn)
            else:
                word = turn.error or f"no reply, status {turn.status}"
                yield self._event("ConversationErrorEvent", "environment", turn, code="model", detail=word)

    def _said(self, message: Message, turn: Turn) -> Iterator[dict[str, Any]]:
        if message.role == "system":
            prompt = {"type": "text", "text": message.text}
            yield self._event("SystemPromptEvent", "agent", turn, system_prompt=prompt, tools=[])
        elif message.role == "tool" and message.answers in self._calls:
            yield self._observation(message, turn)
        elif message.calls:
            yield from self._actions(message, turn)
        else:
            yield self._message(message, turn)

    def _message(self, message: Message, turn: Turn) -> dict[str, Any]:
        role = message.role if message.role in ("assistant", "tool") else "user"
        source = {"assistant": "agent", "tool": "environment"}.get(role, "user")
        said: dict[str, Any] = {"role": role, "content": self._content(message.parts)}
        if role == "assistant":
            said["reasoning_content"] = message.reasoning or None
        elif role == "tool":
            said |= {"tool_call_id": message.answers or None, "name": message.tool or None}
        response = self._response(turn) if role == "assistant" else None
        return self._event("MessageEvent", source, turn, llm_message=said, llm_response_id=response)

    def _actions(self, message: Message, turn: Turn) -> Iterator[dict[str, Any]]:
        """An event for each call; what was said and thought before them stands in the first."""
        thought = [part for part in self._content(message.parts) if part["type"] == "text" and part["text"]]
        for place, call in enumerate(message.calls):
            given = call.arguments
            event = self._event(
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
                tool_call=_tool_call(call, turn),
                llm_response_id=self._response(turn),
            )
            self._remember(call.id, event["id"])
            yield event

    def _remember(self, call: str, event: str) -> None:
        self._calls[call] = event
        if len(self._calls) > MOST_OPEN:
            del self._calls[next(iter(self._calls))]

    def _observation(self, message: Message, turn: Turn) -> dict[str, Any]:
        observation = {
            "kind": "MCPToolObservation",
            "content": self._content(message.parts),
            "is_error": message.failed,
            "tool_name": message.tool,
        }
        return self._event(
            "ObservationEvent",
            "environment",
            turn,
            observation=observation,
            tool_name=message.tool,
            tool_call_id=message.answers,
            action_id=self._calls.pop(message.answers),
        )

    def _event(self, kind: str, source: str, turn: Turn, **rest: Any) -> dict[str, Any]:
        self._count += 1
        at = datetime.fromtimestamp(turn.started, UTC).isoformat()
        return {
            "kind": kind,
            "id": f"{self._session}-{self._count}",
            "timestamp": at,
            "source": source,
            **rest,
        }

    def _response(self, turn: Turn) -> str:
        return f"{self._session}-reply-{turn.number}"

    def _content(self, parts: tuple[str | Media, ...]) -> list[dict[str, Any]]:
        return [{"type": "text", "text": p} if isinstance(p, str) else self._medium(p) for p in parts]

    def _medium(self, media: Media) -> dict[str, Any]:
        if media.type.partition("/")[0] == "image":
            return {"type": "image", "image_urls": [self._url(media)]}
        return {"type": "text", "text": f"[{media.type or 'media'}: {media.url or media.blob}]"}

    def _url(self, media: Media) -> str:
        if media.url:
            return media.url
        data = media.data or base64.b64encode(self._blobs.get(media.blob)).decode()
        return f"data:{media.type};base64,{data}"


def _tool_call(call: ToolCall, turn: Turn) -> dict[str, Any]:
    given = call.arguments
    text = given if isinstance(given, str) else _encode({} if given is None else given).decode()
    origin = "responses" if turn.dialect == "responses" else "completion"
    return {"id": call.id, "name": call.name, "arguments": text, "origin": origin}


_encode = msgspec.json.Encoder().encode
