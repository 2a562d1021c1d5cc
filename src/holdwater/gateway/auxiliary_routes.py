"""Answers side calls, the list of models and token counts, in the gateway itself. They are not recorded.

`relay.py` forwards a count to an upstream that supports it, and records it; this is the fallback estimate.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from .dialects import Dialect

BYTES_PER_TOKEN = 4
SERVER_HEADER = {"Server": "holdwater"}
_EPOCH = "1970-01-01T00:00:00Z"


def make_refusal(dialect: Dialect, status: int, message: str, code: str | None = None) -> web.Response:
    """Return an error of the gateway in the client's dialect; a header keeps clients from retrying."""
    return web.Response(
        status=status,
        body=dialect.error_body(status, message, code),
        content_type="application/json",
        headers={"x-should-retry": "false", **SERVER_HEADER},
    )


def estimate_tokens(dialect: Dialect, size: int) -> web.Response:
    """Return an estimate of the tokens in a request of `size` bytes."""
    tokens = max(1, size // BYTES_PER_TOKEN)
    return _make_response(
        {"totalTokens": tokens} if dialect.form.upstream_dialect == "gemini" else {"input_tokens": tokens}
    )


def list_models(dialect: Dialect, asked: str | None, model: str | None) -> web.Response:
    """Return the model named `asked`, which always exists, or else the list of models."""
    shape, listed = _SHAPES.get(dialect.form.dialect, (_openai, _openai_list))
    if asked is not None:
        return _make_response(shape(asked))
    return _make_response(listed([shape(model)] if model else []))


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


def _make_response(document: dict[str, Any]) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(document), content_type="application/json", headers=SERVER_HEADER
    )
