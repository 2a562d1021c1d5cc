"""Parses OpenAI Chat Completions into common messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..message import (
    CommonMessage,
    MessageMedia,
    ToolCall,
    as_dict,
    as_list,
    as_string,
    parse_arguments,
    render_unknown,
    to_media,
    to_part,
)
from .dialect_form import ROLES, DialectForm, ModelReply, ReplyTokens, make_function_tool


def _parse_message(item: dict[str, Any]) -> Iterator[CommonMessage]:
    role = as_string(item.get("role"))
    yield CommonMessage(
        role=ROLES.get(role, "unknown"),
        parts=tuple(parse_content(item.get("content"))) + _parse_refusal(item),
        reasoning=as_string(item.get("reasoning_content")) or as_string(item.get("reasoning")),
        calls=tuple(_parse_calls(item)),
        answers=as_string(item.get("tool_call_id")),
        tool=as_string(item.get("name")) if ROLES.get(role) == "tool" else "",
    )


def _parse_refusal(item: dict[str, Any]) -> tuple[str, ...]:
    refusal = as_string(item.get("refusal"))
    return (refusal,) if refusal else ()


def _parse_calls(item: dict[str, Any]) -> Iterator[ToolCall]:
    calls = as_list(item.get("tool_calls"))
    if isinstance(item.get("function_call"), dict):
        calls = [*calls, {"function": item["function_call"]}]
    for call in map(as_dict, calls):
        custom = as_dict(call.get("custom"))
        called = as_dict(call.get("function")) or custom
        given = custom.get("input") if custom else parse_arguments(called.get("arguments"))
        yield ToolCall(id=as_string(call.get("id")), name=as_string(called.get("name")), arguments=given)


def parse_content(given: Any) -> Iterator[str | MessageMedia]:
    """Parse content of Chat Completions or Responses: a text or a list of parts."""
    if isinstance(given, list):
        for part in given:
            yield _parse_part(as_dict(part) or {"type": "", "text": part})
    elif given is not None and given != "":
        yield to_part(given)


def _parse_part(part: dict[str, Any]) -> str | MessageMedia:
    kind = as_string(part.get("type"))
    image = part.get("image_url")
    if image is not None:
        return to_media(as_dict(image).get("url") if isinstance(image, dict) else image, "image")
    if kind == "input_audio":
        audio = as_dict(part.get("input_audio")) or part
        return to_media(audio.get("data"), f"audio/{as_string(audio.get('format')) or 'wav'}", bare=True)
    if kind in ("file", "input_file", "input_image"):
        file = as_dict(part.get("file")) or part
        where = file.get("file_data") or file.get("file_url") or file.get("file_id")
        return to_media(where, "image" if kind == "input_image" else "file")
    if "text" in part or "refusal" in part:
        return to_part(part.get("text", part.get("refusal")))
    return render_unknown(part)


def _parse_system(head: dict[str, Any]) -> Iterator[CommonMessage]:
    return iter(())


def _parse_reply(reply: dict[str, Any]) -> ModelReply:
    choices = [as_dict(choice) for choice in as_list(reply.get("choices"))]
    said_ = [m for c in choices if (spoken := as_dict(c.get("message"))) for m in _parse_message(spoken)]
    first = choices[0] if choices else {}
    return ModelReply(
        message=said_[0] if said_ else None,
        others=tuple(said_[1:]),
        finish=as_string(first.get("finish_reason")),
        model=as_string(reply.get("model")),
        tokens=parse_tokens(reply, first),
    )


def parse_tokens(reply: dict[str, Any], choice: dict[str, Any]) -> ReplyTokens:
    """Read the token ids and log probabilities that an upstream of any dialect adds to a reply."""
    return ReplyTokens(
        prompt=_parse_integers(reply.get("prompt_token_ids")),
        completion=_parse_integers(choice.get("token_ids")),
        logprobs=_parse_logprobs(as_dict(choice.get("logprobs")).get("content")),
    )


def _parse_integers(value: Any) -> tuple[int, ...]:
    given = as_list(value)
    return tuple(given) if set(map(type, given)) <= {int} else ()


def _parse_logprobs(value: Any) -> tuple[float | None, ...]:
    """Return one value per token; None keeps the position of a missing value."""
    given = [as_dict(token).get("logprob") for token in as_list(value)]
    return tuple(float(p) if isinstance(p, int | float) else None for p in given)


def _parse_tools(head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (tool for tool in as_list(head.get("tools")) if isinstance(tool, dict))
    for legacy in map(as_dict, as_list(head.get("functions"))):
        yield make_function_tool(
            as_string(legacy.get("name")), legacy.get("description"), legacy.get("parameters")
        )


CHAT = DialectForm("messages", _parse_message, _parse_system, _parse_reply, _parse_tools)
