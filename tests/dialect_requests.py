"""How a client says the same thing in each dialect: for tests that go through all four."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from tests.gateway_harness import MODEL, Scene

DIALECTS = ("chat", "responses", "messages", "gemini")


class Request(NamedTuple):
    path: str
    body: bytes
    headers: Mapping[str, str]


def speak(dialect: str, *texts: str, stream: bool = False, **options: Any) -> Request:
    """A request whose messages say `texts`, the user and the assistant in turn."""
    roles = ("user", "assistant" if dialect != "gemini" else "model")
    said = [(roles[i % 2], text) for i, text in enumerate(texts)]
    body: dict[str, Any]
    if dialect == "gemini":
        method = "streamGenerateContent?alt=sse" if stream else "generateContent"
        body = {"contents": [{"role": role, "parts": [{"text": text}]} for role, text in said], **options}
        return Request(f"/v1beta/models/{MODEL}:{method}", msgspec.json.encode(body), {})
    messages = [{"role": role, "content": text} for role, text in said]
    body = {"model": MODEL, **({"stream": True} if stream else {}), **options}
    if dialect == "messages":
        body = {**body, "max_tokens": 64, "messages": messages}
        return Request(
            "/v1/messages?beta=true", msgspec.json.encode(body), {"anthropic-version": "2023-06-01"}
        )
    if dialect == "responses":
        return Request("/v1/responses", msgspec.json.encode({**body, "input": messages}), {})
    if stream:
        body["stream_options"] = {"include_usage": True}
    return Request("/v1/chat/completions", msgspec.json.encode({**body, "messages": messages}), {})


def send(s: Scene, request: Request, key: str | None = None, **headers: str) -> Any:
    """Post it with the session's key as a bearer's."""
    told = {"Authorization": f"Bearer {key or s.session.key}", **request.headers, **headers}
    return s.http.post(root(s) + request.path, data=request.body, headers=told)


def root(s: Scene) -> str:
    return s.gateway.url.removesuffix("/v1")


def text_of(dialect: str, reply: Any) -> str:
    """What a reply says, in one piece."""
    if dialect == "chat":
        return str(reply["choices"][0]["message"]["content"])
    if dialect == "responses":
        parts = [part for item in reply["output"] for part in item.get("content") or ()]
        return "".join(part["text"] for part in parts)
    if dialect == "messages":
        return "".join(block.get("text", "") for block in reply["content"])
    return "".join(part.get("text", "") for part in reply["candidates"][0]["content"]["parts"])


def message_of(error: Any) -> str:
    """The message in an error's body, which has its place in each dialect."""
    return str(error["error"]["message"])
