"""Translates the sampling parameters that a run imposes into each dialect. It sends nothing.

The common names are the Chat Completions names: `temperature`, `top_p`, `top_k`, `max_tokens`, `seed`. Any
other key goes into the request unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

_SAMPLED_DIALECTS = frozenset({"chat", "completions", "responses", "messages", "gemini"})
_RESPONSES = {"max_tokens": "max_output_tokens"}
_GEMINI = {
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "max_tokens": "maxOutputTokens",
    "seed": "seed",
}


def impose_sampling(dialect: str, head: Mapping[str, Raw], sampling: Mapping[str, Any]) -> dict[str, Raw]:
    """Return the keys of a request that change."""
    if not sampling or dialect not in _SAMPLED_DIALECTS:
        return {}
    if dialect == "gemini":
        return _impose_gemini(head, sampling)
    named = {
        _name_parameter(dialect, head, key): Raw(msgspec.json.encode(value))
        for key, value in sampling.items()
    }
    return {key: raw for key, raw in named.items() if bytes(head.get(key, b"")) != bytes(raw)}


def _name_parameter(dialect: str, head: Mapping[str, Raw], key: str) -> str:
    if dialect == "responses":
        return _RESPONSES.get(key, key)
    # Newer OpenAI models refuse `max_tokens`, and all models refuse both keys together.
    newer = dialect == "chat" and key == "max_tokens" and "max_completion_tokens" in head
    return "max_completion_tokens" if newer else key


def _impose_gemini(head: Mapping[str, Raw], sampling: Mapping[str, Any]) -> dict[str, Raw]:
    known = "generationConfig" if "generationConfig" in head else "generation_config"
    if known not in head:
        known = "generationConfig"
    config = msgspec.json.decode(head.get(known, b"null"), type=dict[str, Raw] | None) or {}
    for key, value in sampling.items():
        config[_GEMINI.get(key, key)] = Raw(msgspec.json.encode(value))
    return {known: Raw(msgspec.json.encode(config))}
