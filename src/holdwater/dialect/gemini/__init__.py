"""Gemini generateContent and streamGenerateContent: the model is in the path, and a stream has no end mark.

A stream that is not requested as events is one JSON array: it is read as a whole. `stream.py` has the
streams.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Raw

from ..conversion import (
    JSON_OBJECT,
    TOOL_CHOICES,
    CompletionContent,
    ReplyContext,
    make_response_format,
    make_tool_choice,
)
from ..interface import (
    AdaptedRequest,
    Dialect,
    ParsedReply,
    PathMatch,
    ProviderVariables,
    ReplyFormat,
    RequestTarget,
    check_utf8,
    know_headers,
)
from ..message import (
    DECODE_ERRORS,
    ROLES,
    SHAPE_ERRORS,
    CommonMessage,
    MessageMedia,
    ModelReply,
    as_dict,
    as_list,
    as_string,
    make_function_tool,
    parse_call,
    render_unknown,
    to_media,
    to_part,
)
from ..reply_tokens import parse_tokens
from ..sse import decode_values, render_event
from ..untranslated_fields import GEMINI_CONFIG, GEMINI_KNOWN, GEMINI_RULES, pick_extensions
from .stream import (
    GeminiStream,
    GeminiWriter,
    count_usage,
    find_finish_reason,
    make_call_part,
    make_chunk,
    make_usage,
)

_ROUTE = re.compile(r"(?:/v1)*?(?:/(v1(?:alpha|beta)?\d*))?/((?:models|tunedModels)/[^:]+):(\w+)")
_METHODS = {"generateContent": False, "streamGenerateContent": False, "countTokens": True}
_PATH = re.compile(r"(?P<version>[^/]+)/(?P<model>.+):(?P<method>\w+)")
# The name goes into an upstream path: no part is `..`, and nothing in it is encoded.
_NAME = re.compile(r"[A-Za-z0-9][\w.@+-]*(?:/[A-Za-z0-9][\w.@+-]*)*", re.ASCII)
_STATUS_NAMES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    504: "DEADLINE_EXCEEDED",
}
_SAMPLING = {"top_p": "topP", "top_k": "topK", "max_tokens": "maxOutputTokens"}
_OPTIONS = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
    "candidateCount": "n",
}


class GeminiDialect(Dialect):
    name = "gemini"
    path = "v1beta/models"
    provider = ProviderVariables(
        "https://generativelanguage.googleapis.com",
        "GOOGLE_GEMINI_BASE_URL",
        ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    )
    known_headers = know_headers({"x-goog-api-client", "x-server-timeout"}, "x-gemini-")
    key_header = "x-goog-api-key"
    key = "contents"
    model_in_path = True
    system_keys = ("systemInstruction", "system_instruction")
    reply_key = "candidates"
    count_key = "totalTokens"
    choice_key = "toolConfig.functionCallingConfig"
    known_keys = GEMINI_KNOWN
    untranslated = GEMINI_RULES

    def match_path(self, path: str) -> PathMatch | None:
        match = _ROUTE.fullmatch(path)
        if match is None or match[3] not in _METHODS:
            return None
        version, model = match[1] or "v1beta", quote(match[2], safe="/@+")
        return PathMatch(f"{version}/{model}:{match[3]}", _METHODS[match[3]])

    def recognizes(self, path: str, headers: Mapping[str, str]) -> bool:
        return "/v1beta" in path or "x-goog-api-key" in headers

    def strip_generated(self, message: bytes) -> bytes:
        """Return a content without the ids of its calls, which a client generates if the model gives none."""
        if b'"id"' not in message:
            return message
        try:
            fields = msgspec.json.decode(message, type=dict[str, Any])
        except DECODE_ERRORS:
            return message
        parts = fields.get("parts")
        for part in parts if isinstance(parts, list) else ():
            for kind in ("functionCall", "functionResponse"):
                called = part.get(kind) if isinstance(part, dict) else None
                if isinstance(called, dict):
                    called.pop("id", None)
        return msgspec.json.encode(fields)

    def read_model(self, head: Mapping[str, Raw], place: RequestTarget) -> str:
        match = _PATH.fullmatch(place.path)
        return match["model"].removeprefix("models/") if match else ""

    def recognizes_reply(self, body: bytes) -> bool:
        return super().recognizes_reply(body) or b'"promptFeedback"' in body  # the prompt was blocked

    def adapt_request(self, head: dict[str, Raw], place: RequestTarget, model: str | None) -> AdaptedRequest:
        match = _PATH.fullmatch(place.path)
        asked = match["model"] if match else ""
        if match and model is not None:
            asked = model if "/" in model else f"models/{model}"
            path = f"{match['version']}/{quote(asked)}:{match['method']}"
            place = place._replace(path=path)
        elif _NAME.fullmatch(asked) is None:
            raise msgspec.ValidationError(f"invalid model name: `{asked[:200]}`")
        return AdaptedRequest(place, {}, {"model": Raw(msgspec.json.encode(asked.removeprefix("models/")))})

    def impose_sampling(self, head: Mapping[str, Raw], sampling: Mapping[str, Any]) -> dict[str, Raw]:
        if not sampling:
            return {}
        either = ("generationConfig", "generation_config")
        known = next((key for key in either if key in head), either[0])
        config = msgspec.json.decode(head.get(known, b"null"), type=dict[str, Raw] | None) or {}
        for key, value in sampling.items():
            config[_SAMPLING.get(key, key)] = Raw(msgspec.json.encode(value))
        return {known: Raw(msgspec.json.encode(config))}

    def read_format(self, head: Mapping[str, Raw], place: RequestTarget) -> ReplyFormat:
        if ":streamGenerateContent" not in place.path:
            return super().read_format(head, place)
        return ReplyFormat.EVENTS if "alt=sse" in place.query.split("&") else ReplyFormat.ARRAY

    def make_context(self, request: Mapping[str, Any], path: str) -> ReplyContext:
        match = _PATH.match(path)
        return ReplyContext(match["model"].removeprefix("models/") if match else "")

    def error_body(self, status: int, message: str, code: str | None = None) -> bytes:
        word = _STATUS_NAMES.get(status, "INVALID_ARGUMENT" if status < 500 else "UNAVAILABLE")
        return msgspec.json.encode({"error": {"code": status, "message": message, "status": word}})

    def read_reply(self, body: bytes) -> ParsedReply:
        check_utf8(body)
        if not body.lstrip().startswith(b"["):
            reply = msgspec.json.decode(body, type=_GeminiReply)
            return ParsedReply(count_usage(reply.usageMetadata), reply.error)
        stream = GeminiStream()
        try:
            for chunk in msgspec.json.decode(body, type=list[dict[str, Any]]):
                stream.add(chunk)
        except SHAPE_ERRORS as error:
            raise msgspec.ValidationError(str(error)) from None
        return ParsedReply(stream.usage, stream.error, stream.reply(), body)

    def stream(self, asked: AdaptedRequest) -> GeminiStream:
        return GeminiStream()

    def render_stream(self, reply: bytes) -> list[bytes]:
        return [render_event(decode_values(reply))]  # a chunk has the form of a reply

    def render_model(self, model: str) -> dict[str, Any]:
        name = model if "/" in model else f"models/{model}"
        return {"name": name, "displayName": model, "supportedGenerationMethods": list(_METHODS)}

    def render_models(self, models: list[dict[str, Any]]) -> dict[str, Any]:
        return {"models": models}

    def parse_message(self, item: dict[str, Any]) -> Iterator[CommonMessage]:
        parts = _list_parts(item)
        answered = [part for part in parts if _get_either(part, "functionResponse")]
        for part in answered:
            answer = as_dict(_get_either(part, "functionResponse"))
            yield CommonMessage(
                role="tool",
                parts=tuple(_parse_answer(answer)),
                answers=as_string(answer.get("id")),
                tool=as_string(answer.get("name")),
            )
        rest = [part for part in parts if not _get_either(part, "functionResponse")]
        if rest or not answered:
            yield _make_message(ROLES.get(as_string(item.get("role")) or "user", "unknown"), rest)

    def parse_system(self, head: dict[str, Any]) -> Iterator[CommonMessage]:
        system = as_dict(_get_either(head, "systemInstruction"))
        for message in self.parse_message(system) if system else ():
            yield CommonMessage(role="system", parts=message.parts)

    def parse_tools(self, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for tool in map(as_dict, as_list(head.get("tools"))):
            for declared in map(as_dict, as_list(_get_either(tool, "functionDeclarations"))):
                schema = to_json_schema(declared.get("parameters"))
                parameters = _get_either(declared, "parametersJsonSchema") or schema
                yield make_function_tool(
                    as_string(declared.get("name")), declared.get("description"), parameters
                )

    def parse_reply(self, reply: dict[str, Any]) -> ModelReply:
        candidates = [as_dict(candidate) for candidate in as_list(reply.get("candidates"))]
        contents = [content for candidate in candidates if (content := as_dict(candidate.get("content")))]
        spoken = [_make_message("assistant", _list_parts(content)) for content in contents]
        blocked = as_string(as_dict(reply.get("promptFeedback")).get("blockReason"))
        return ModelReply(
            message=spoken[0] if spoken else None,
            others=tuple(spoken[1:]),
            finish=blocked or (as_string(candidates[0].get("finishReason")) if candidates else ""),
            model=as_string(reply.get("modelVersion")),
            tokens=parse_tokens(reply, reply),
        )

    def split_choices(self, reply: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        for candidate in map(as_dict, as_list(reply.get("candidates"))):
            yield candidate.get("content"), {**reply, "candidates": [candidate]}

    def convert_options(self, request: Mapping[str, Any]) -> dict[str, Any]:
        config = as_dict(request.get("generationConfig", request.get("generation_config")))
        tools = as_dict(request.get("toolConfig", request.get("tool_config")))
        calling = as_dict(tools.get("functionCallingConfig", tools.get("function_calling_config")))
        names = as_list(_get_either(calling, "allowedFunctionNames"))
        mode = TOOL_CHOICES.get(as_string(calling.get("mode")).lower())
        return {
            **{name: _get_either(config, theirs) for theirs, name in _OPTIONS.items()},
            "response_format": _make_format(config),
            "tool_choice": make_tool_choice(names[0]) if len(names) == 1 and mode == "required" else mode,
        }

    def pick_extensions(self, request: Mapping[str, Any]) -> dict[str, Any]:
        config = as_dict(_get_either(request, "generationConfig"))
        return {**super().pick_extensions(request), **pick_extensions(config, GEMINI_CONFIG, ())}

    def render_completion(self, content: CompletionContent) -> dict[str, Any]:
        parts: list[dict[str, Any]] = []
        if content.thoughts:
            parts.append({"text": content.thoughts, "thought": True})
        if content.text or not content.calls:
            parts.append({"text": content.text})
        parts += map(make_call_part, content.calls)
        return {
            **make_chunk(content, parts, finishReason=find_finish_reason(content)),
            "usageMetadata": make_usage(content),
        }

    def append_text(self, reply: dict[str, Any], text: str) -> None:
        parts = reply["candidates"][0]["content"]["parts"]
        calls = (place for place, part in enumerate(parts) if _get_either(as_dict(part), "functionCall"))
        parts.insert(next(calls, len(parts)), {"text": text})

    def write_stream(self, context: ReplyContext) -> GeminiWriter:
        return GeminiWriter(context)


def _make_format(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the response format of a request."""
    schema = to_json_schema(_get_either(config, "responseSchema"))
    if schema := _get_either(config, "responseJsonSchema") or schema:
        return make_response_format(schema, {})
    return JSON_OBJECT if _get_either(config, "responseMimeType") == "application/json" else None


def to_json_schema(schema: Any) -> Any:
    """Return a schema of Google's own form, whose types are in capitals, as JSON Schema."""
    if isinstance(schema, list):
        return [to_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    small = {"type": schema["type"].lower()} if isinstance(schema.get("type"), str) else {}
    return {**{name: to_json_schema(value) for name, value in schema.items()}, **small}


def _parse_answer(answer: dict[str, Any]) -> Iterator[str | MessageMedia]:
    """Yield a response with a single text as that text, any other response as JSON; then its media."""
    response = answer.get("response")
    values = list(as_dict(response).values())
    yield to_part(values[0] if len(values) == 1 and isinstance(values[0], str) else response)
    for part in map(as_dict, as_list(answer.get("parts"))):
        yield _parse_part(part)


def _make_message(role: str, parts: list[dict[str, Any]]) -> CommonMessage:
    thoughts = [as_string(part.get("text")) for part in parts if part.get("thought") is True]
    calls = [as_dict(call) for part in parts if (call := _get_either(part, "functionCall"))]
    aside = {"thoughtSignature", "thought_signature"}
    others = [part for part in parts if part.get("thought") is not True and set(part) - aside]
    shown = [part for part in others if not _get_either(part, "functionCall")]
    said = [_parse_part(part) for part in shown if part.get("text") != ""]
    if said and role == "assistant" and all(isinstance(part, str) for part in said):
        said = ["".join(map(str, said))]  # clients send the chunks of a stream back
    return CommonMessage(
        role=role,
        parts=tuple(said),
        reasoning="".join(thoughts),
        calls=tuple(parse_call(call, "args") for call in calls),
    )


def _parse_part(part: dict[str, Any]) -> str | MessageMedia:
    inline, file = as_dict(_get_either(part, "inlineData")), as_dict(_get_either(part, "fileData"))
    if inline:
        return to_media(inline.get("data"), as_string(_get_either(inline, "mimeType")), bare=True)
    if file:
        return to_media(_get_either(file, "fileUri"), as_string(_get_either(file, "mimeType")))
    return to_part(part["text"]) if "text" in part else render_unknown(part)


def _get_either(part: Mapping[str, Any], name: str) -> Any:
    """Return a field by its camelCase or snake_case name: the provider accepts both."""
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return part.get(name, part.get(snake))


def _list_parts(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [as_dict(part) or {"text": part} for part in as_list(content.get("parts"))]


class _GeminiReply(msgspec.Struct):
    usageMetadata: Any = None
    error: Any = None
