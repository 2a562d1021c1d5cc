"""Parses OpenAI text completions and embeddings into common messages. They are not conversation turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..message import CommonMessage, as_dict, as_list, as_string, render_unknown
from .chat import parse_tokens
from .dialect_form import DialectForm, ModelReply


def _parse_prompt(head: dict[str, Any]) -> Iterator[CommonMessage]:
    """Yield the prompt, or the texts to embed, as one message; token ids are rendered as JSON."""
    given = head.get("prompt", head.get("input"))
    texts = given if isinstance(given, list) and all(isinstance(text, str) for text in given) else [given]
    parts = tuple(
        text if isinstance(text, str) else render_unknown(text) for text in texts if text is not None
    )
    if parts:
        yield CommonMessage(role="user", parts=parts)


def _parse_completion(reply: dict[str, Any]) -> ModelReply:
    choices = [as_dict(choice) for choice in as_list(reply.get("choices"))]
    said = [CommonMessage(role="assistant", parts=(as_string(choice.get("text")),)) for choice in choices]
    first = choices[0] if choices else {}
    prompt = first.get("prompt_token_ids", reply.get("prompt_token_ids"))
    given = zip_logprobs(as_dict(first.get("logprobs")))
    return ModelReply(
        message=said[0] if said else None,
        others=tuple(said[1:]),
        finish=as_string(first.get("finish_reason")),
        model=as_string(reply.get("model")),
        tokens=parse_tokens({"prompt_token_ids": prompt}, {**first, "logprobs": {"content": given}}),
    )


def zip_logprobs(logprobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the log probabilities in the Chat Completions format."""
    return [{"logprob": logprob} for logprob in as_list(logprobs.get("token_logprobs"))]


def _parse_embedding(reply: dict[str, Any]) -> ModelReply:
    found = [as_dict(one) for one in as_list(reply.get("data"))]
    if not found:
        return ModelReply(model=as_string(reply.get("model")))
    noun = "embedding" if len(found) == 1 else "embeddings"
    size = len(as_list(found[0].get("embedding")))
    text = f"[{len(found)} {noun}{f' of {size} numbers' if size else ''}]"
    return ModelReply(
        message=CommonMessage(role="assistant", parts=(text,)), model=as_string(reply.get("model"))
    )


def _parse_nothing(item: dict[str, Any]) -> Iterator[Any]:
    return iter(())


COMPLETIONS = DialectForm("messages", _parse_nothing, _parse_prompt, _parse_completion, _parse_nothing)
EMBEDDINGS = DialectForm("messages", _parse_nothing, _parse_prompt, _parse_embedding, _parse_nothing)
