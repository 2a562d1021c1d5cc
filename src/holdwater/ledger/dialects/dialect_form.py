"""The interface of a dialect: where its requests hold messages, and how to parse them as common messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ...core.records import Record
from ..message import CommonMessage

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}


class ReplyTokens(Record, frozen=True):
    """Token ids and log probabilities of a reply, where the upstream returns them."""

    prompt: tuple[int, ...] = ()
    completion: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()  # one per token; None: not returned, or not finite


class ModelReply(Record, frozen=True):
    """A parsed reply: the message of the first choice, and the messages of the other choices."""

    message: CommonMessage | None = None
    others: tuple[CommonMessage, ...] = ()
    finish: str = ""
    model: str = ""
    tokens: ReplyTokens = ReplyTokens()


class DialectForm(NamedTuple):
    key: str  # the request field that holds the messages
    messages: Callable[[dict[str, Any]], Iterator[CommonMessage]]  # parses one; may yield several
    system: Callable[[dict[str, Any]], Iterator[CommonMessage]]  # parses prompts outside the message list
    reply: Callable[[dict[str, Any]], ModelReply]
    tools: Callable[[dict[str, Any]], Iterator[dict[str, Any]]]  # in the Chat Completions format


def make_function_tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """Return a tool definition in the Chat Completions format."""
    described = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters or {}}}
