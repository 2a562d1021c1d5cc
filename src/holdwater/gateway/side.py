"""Side calls: what models there are, how many tokens a request has. Answered here, and not recorded.

`relay.py` passes a count on to an upstream that can tell, and records it; this is the answer where none can.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from .dialects import Dialect

BYTES_PER_TOKEN = 4
SERVER = {"Server": "holdwater"}
_EPOCH = "1970-01-01T00:00:00Z"


def refusal(dialect: Dialect, status: int, message: str, code: str | None = None) -> web.Response:
    """An error of the gateway itself, in the client's dialect; the header keeps clients from looping."""
    return web.Response(
        status=status,
        body=dialect.error_body(status, message, code),
        content_type="application/json",
        headers={"x-should-retry": "false", **SERVER},
    )


def counted(dialect: Dialect, size: int) -> web.Response:
    """An estimate of the tokens in a request of `size` bytes."""
    tokens = max(1, size // BYTES_PER_TOKEN)
    return _json({"totalTokens": tokens} if dialect.form.spoken == "gemini" else {"input_tokens": tokens})


def models(dialect: Dialect, asked: str | None, model: str | None) -> web.Response:
    """The one that is asked after, whatever it is called: it is served; or a list of what there is."""
    shape, listed = _SHAPES.get(dialect.form.dialect, (_openai, _openai_list))
    if asked is not None:
        return _json(shape(asked))
    return _json(listed([shape(model)] if model else []))


def _openai(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "upstream"}


def _openai_list(models: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": models}


def _anthropic(model: str) -> dict[str, Any]:
    return {"type": "model", "id": model, "display_name": model, "created_at": _EPOCH}


def _anthropic_list(models: list[dict[str, Any]]) -> dict[str, Any]:
    ids = [model["id"] for model in models] or [None]
    return {"data": models, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


def _gemini(model: str) -> dict[str, Any]:
    name = model if "/" in model else f"models/{model}"
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    return {"name": name, "displayName": model, "supportedGenerationMethods": methods}


def _gemini_list(models: list[dict[str, Any]]) -> dict[str, Any]:
    return {"models": models}


_SHAPES = {"messages": (_anthropic, _anthropic_list), "gemini": (_gemini, _gemini_list)}


def _json(document: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json", headers=SERVER)
