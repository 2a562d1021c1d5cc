"""OpenAI Chat Completions, as common messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..message import Media, Message, ToolCall, arguments, compact, fields, items, medium, said, string
from .form import ROLES, Dialect, Reply, Tokens, function


def _messages(item: dict[str, Any]) -> Iterator[Message]:
    role = string(item.get("role"))
    yield Message(
        role=ROLES.get(role, "unknown"),
        parts=tuple(content(item.get("content"))) + _refused(item),
        reasoning=string(item.get("reasoning_content")) or string(item.get("reasoning")),
        calls=tuple(_calls(item)),
        answers=string(item.get("tool_call_id")),
        tool=string(item.get("name")) if ROLES.get(role) == "tool" else "",
    )


def _refused(item: dict[str, Any]) -> tuple[str, ...]:
    refusal = string(item.get("refusal"))
    return (refusal,) if refusal else ()


def _calls(item: dict[str, Any]) -> Iterator[ToolCall]:
    calls = items(item.get("tool_calls"))
    if isinstance(item.get("function_call"), dict):
        calls = [*calls, {"function": item["function_call"]}]
    for call in map(fields, calls):
        custom = fields(call.get("custom"))
        called = fields(call.get("function")) or custom
        given = custom.get("input") if custom else arguments(called.get("arguments"))
        yield ToolCall(id=string(call.get("id")), name=string(called.get("name")), arguments=given)


def content(given: Any) -> Iterator[str | Media]:
    """Text, or a list of parts, in either of OpenAI's dialects."""
    if isinstance(given, list):
        for part in given:
            yield _part(fields(part) or {"type": "", "text": part})
    elif given is not None and given != "":
        yield said(given)


def _part(part: dict[str, Any]) -> str | Media:
    kind = string(part.get("type"))
    image = part.get("image_url")
    if image is not None:
        return medium(fields(image).get("url") if isinstance(image, dict) else image, "image")
    if kind == "input_audio":
        audio = fields(part.get("input_audio")) or part
        return medium(audio.get("data"), f"audio/{string(audio.get('format')) or 'wav'}", bare=True)
    if kind in ("file", "input_file", "input_image"):
        file = fields(part.get("file")) or part
        where = file.get("file_data") or file.get("file_url") or file.get("file_id")
        return medium(where, "image" if kind == "input_image" else "file")
    if "text" in part or "refusal" in part:
        return said(part.get("text", part.get("refusal")))
    return compact(part)


def _system(head: dict[str, Any]) -> Iterator[Message]:
    return iter(())


def _reply(reply: dict[str, Any]) -> Reply:
    choices = [fields(choice) for choice in items(reply.get("choices"))]
    said_ = [m for c in choices if (spoken := fields(c.get("message"))) for m in _messages(spoken)]
    first = choices[0] if choices else {}
    return Reply(
        message=said_[0] if said_ else None,
        others=tuple(said_[1:]),
        finish=string(first.get("finish_reason")),
        model=string(reply.get("model")),
        tokens=tokens(reply, first),
    )


def tokens(reply: dict[str, Any], choice: dict[str, Any]) -> Tokens:
    """As upstreams put them into a reply and its choice, in whatever dialect."""
    return Tokens(
        prompt=_integers(reply.get("prompt_token_ids")),
        completion=_integers(choice.get("token_ids")),
        logprobs=_logprobs(fields(choice.get("logprobs")).get("content")),
    )


def _integers(value: Any) -> tuple[int, ...]:
    given = items(value)
    return tuple(given) if set(map(type, given)) <= {int} else ()


def _logprobs(value: Any) -> tuple[float | None, ...]:
    """Each keeps its token's position."""
    given = [fields(token).get("logprob") for token in items(value)]
    return tuple(float(p) if isinstance(p, int | float) else None for p in given)


def _tools(head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (tool for tool in items(head.get("tools")) if isinstance(tool, dict))
    for legacy in map(fields, items(head.get("functions"))):
        yield function(string(legacy.get("name")), legacy.get("description"), legacy.get("parameters"))


CHAT = Dialect("messages", _messages, _system, _reply, _tools)
