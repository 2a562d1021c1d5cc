"""OpenAI's text completions and embeddings, as common messages. They are beside every conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..message import Message, compact, fields, items, string
from .chat import tokens
from .form import Dialect, Reply


def _prompt(head: dict[str, Any]) -> Iterator[Message]:
    """The prompt, or the texts that are embedded; token ids as they are."""
    given = head.get("prompt", head.get("input"))
    texts = given if isinstance(given, list) and all(isinstance(text, str) for text in given) else [given]
    parts = tuple(text if isinstance(text, str) else compact(text) for text in texts if text is not None)
    if parts:
        yield Message(role="user", parts=parts)


def _completion(reply: dict[str, Any]) -> Reply:
    choices = [fields(choice) for choice in items(reply.get("choices"))]
    said = [Message(role="assistant", parts=(string(choice.get("text")),)) for choice in choices]
    first = choices[0] if choices else {}
    prompt = first.get("prompt_token_ids", reply.get("prompt_token_ids"))
    given = zip_logprobs(fields(first.get("logprobs")))
    return Reply(
        message=said[0] if said else None,
        others=tuple(said[1:]),
        finish=string(first.get("finish_reason")),
        model=string(reply.get("model")),
        tokens=tokens({"prompt_token_ids": prompt}, {**first, "logprobs": {"content": given}}),
    )


def zip_logprobs(logprobs: dict[str, Any]) -> list[dict[str, Any]]:
    """In the form of Chat Completions."""
    return [{"logprob": logprob} for logprob in items(logprobs.get("token_logprobs"))]


def _embedding(reply: dict[str, Any]) -> Reply:
    found = [fields(one) for one in items(reply.get("data"))]
    if not found:
        return Reply(model=string(reply.get("model")))
    noun = "embedding" if len(found) == 1 else "embeddings"
    size = len(items(found[0].get("embedding")))
    text = f"[{len(found)} {noun}{f' of {size} numbers' if size else ''}]"
    return Reply(message=Message(role="assistant", parts=(text,)), model=string(reply.get("model")))


def _nothing(item: dict[str, Any]) -> Iterator[Any]:
    return iter(())


COMPLETIONS = Dialect("messages", _nothing, _prompt, _completion, _nothing)
EMBEDDINGS = Dialect("messages", _nothing, _prompt, _embedding, _nothing)
