"""What a dialect has to say of itself: where its messages are, and what they are as common ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ...core.records import Record
from ..message import Message

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}


class Tokens(Record, frozen=True):
    """Token ids and log probabilities of a reply, where the upstream gives them."""

    prompt: tuple[int, ...] = ()
    completion: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()  # one a token; None: not given, or no finite number


class Reply(Record, frozen=True):
    """What the model said; other choices than the first come with it."""

    message: Message | None = None
    others: tuple[Message, ...] = ()
    finish: str = ""
    model: str = ""
    tokens: Tokens = Tokens()


class Dialect(NamedTuple):
    key: str  # where a request has its messages
    messages: Callable[[dict[str, Any]], Iterator[Message]]  # one of them; it can be several of ours
    system: Callable[[dict[str, Any]], Iterator[Message]]  # what stands beside the messages
    reply: Callable[[dict[str, Any]], Reply]
    tools: Callable[[dict[str, Any]], Iterator[dict[str, Any]]]  # in the form of Chat Completions


def function(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool in the form of Chat Completions."""
    described = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters or {}}}
