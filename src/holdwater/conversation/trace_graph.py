"""Converts the recorded conversations of an attempt to the message graph that `verifiers` and prime-rl read.

The graph is plain data in the form of their wire: each node has the tokens that it adds to its branch, so
that a branch is a training sample. `nodes.py` builds the messages; `serve/trace_episode.py` adds the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..core.exchange import SCORING_BORROWERS, Exchange
from ..core.records import ModelUsage
from ..core.serving_protocol import MessageNode
from ..dialect import find_dialect
from ..dialect.conversion import to_chat_message
from ..dialect.message import CommonMessage, as_dict, as_list, as_string
from .expert_routing import ExpertRouting, read_routing
from .nodes import build_nodes
from .prompt_deltas import restore_prompt
from .trajectory import ExchangeTree, parse_reply

# The reasons of all dialects for which a model stops, in the three words of the wire.
_FINISHES = {
    "stop": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "completed": "stop",
    "STOP": "stop",
    "length": "length",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "incomplete": "length",
    "MAX_TOKENS": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "tool_use": "tool_calls",
}


class TraceGraph(NamedTuple):
    """The conversations of one agent: of the attempt itself, or of one of its child attempts."""

    name: str  # of the child attempt; empty: the attempt itself
    nodes: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    tools: list[dict[str, Any]]  # of the last request


def build_trace_graphs(tree: ExchangeTree) -> list[TraceGraph]:
    """Return the graph of the attempt, and then one for each child attempt that called a model."""
    builders = {"": _GraphBuilder("", tree)}
    known: dict[int, MessageNode] = {}  # bound: the messages of one attempt
    sampled: dict[int, list[MessageNode]] = {}  # by exchange
    for node in build_nodes(tree, "inline"):
        known[node.id] = node
        if node.sampled:
            sampled.setdefault(node.exchange, []).append(node)
    for number in tree.numbers():
        if tree.converses(number):
            exchange = tree.exchange(number)
            if exchange.by in SCORING_BORROWERS:  # the calls of a judge are not trained on
                continue
            builder = builders.setdefault(exchange.by, _GraphBuilder(exchange.by, tree))
            builder.add_exchange(exchange, sampled.get(number, []), known)
    return [builder.build() for builder in builders.values()]


class _GraphBuilder:
    """The graph of one agent as it grows; bound: the messages of one attempt."""

    def __init__(self, name: str, tree: ExchangeTree) -> None:
        self._name = name
        self._tree = tree
        self._nodes: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._places: dict[int, int | None] = {}  # our node -> the node of the graph at which it ends
        self._exchange: Exchange | None = None  # the newest
        self._tools: list[dict[str, Any]] = []  # of its request

    def add_exchange(
        self, exchange: Exchange, replies: list[MessageNode], known: dict[int, MessageNode]
    ) -> None:
        """Add the messages that led to the replies of an exchange, and the replies."""
        self._exchange = exchange
        if exchange.head is not None:
            self._tools = list(self._list_tools(exchange))
        placed = [
            self._add_reply(reply, known, read_routing(exchange, choice))
            for choice, reply in enumerate(replies)
        ]
        self._calls.append(self._describe_call(exchange, placed[0] if placed else None))
        self._calls += [{"node": place} for place in placed[1:]]  # the usage is that of all choices

    def build(self) -> TraceGraph:
        return TraceGraph(self._name, self._nodes, self._calls, self._tools)

    def _add_reply(
        self, reply: MessageNode, known: dict[int, MessageNode], routing: ExpertRouting | None
    ) -> int:
        before = self._place_path(reply, known)
        path = self._list_path(before)
        prompt, tokens = restore_prompt(reply, known), list(reply.tokens or ())
        kept, offset = self._match_tokens(path, prompt) if prompt else (len(path), 0)
        if kept < len(path):  # the history is tokenized differently now: it is another branch
            before = self._copy_path(path[kept:], path[kept - 1] if kept else None)
        added = prompt[offset:]
        messages = list(convert_message(reply)) or [{"role": "assistant", "content": None}]
        logprobs = reply.logprobs or ()
        trainable = [True] * len(tokens)
        if logprobs:  # a token without its log probability cannot be trained on
            given = [*logprobs, *[None] * len(tokens)][: len(tokens)]
            trainable = [logprob is not None for logprob in given]
        self._places[reply.id] = place = self._add_node(
            before,
            messages[0],
            sampled=True,
            token_ids=added + tokens,
            mask=[False] * len(added) + trainable,
            logprobs=[p for p in logprobs[: len(tokens)] if p is not None],
        )
        if routing is not None:
            self._nodes[place]["routed_experts"] = routing.cut(offset, len(added) + len(tokens))
            before_it = [self._nodes[at] for at in path[:kept] if self._nodes[at].get("token_ids")]
            if before_it:  # the token that follows its last one is known now
                routing.correct(before_it[-1].get("routed_experts"), offset)
        return place

    def _add_node(self, parent: int | None, message: dict[str, Any], **fields: Any) -> int:
        assert self._exchange is not None
        node = {"parent": parent, "message": message, **fields}
        node["timestamp"] = self._exchange.started + self._exchange.seconds
        if parent is None and self._tools:
            node["tools"] = self._tools
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _place_path(self, reply: MessageNode, known: dict[int, MessageNode]) -> int | None:
        """Add the messages before a reply that are not in the graph; return the last node before it."""
        path: list[MessageNode] = []
        at = reply.parent
        while at is not None and at not in self._places:
            path.append(known[at])
            at = known[at].parent
        place = None if at is None else self._places[at]
        for node in reversed(path):
            for message in convert_message(node):
                place = self._add_node(place, message)
            self._places[node.id] = place
        return place

    def _list_path(self, at: int | None) -> list[int]:
        path: list[int] = []
        while at is not None:
            path.append(at)
            at = self._nodes[at]["parent"]
        return path[::-1]

    def _match_tokens(self, path: list[int], prompt: list[int]) -> tuple[int, int]:
        """Return how many nodes of the path the prompt begins with, and the number of their tokens."""
        offset = 0
        for count, place in enumerate(path):
            tokens = self._nodes[place].get("token_ids", ())
            if prompt[offset : offset + len(tokens)] != list(tokens):
                return count, offset
            offset += len(tokens)
        return len(path), offset

    def _copy_path(self, path: list[int], before: int | None) -> int | None:
        """Add the messages of these nodes once more, without tokens; return the last node."""
        for place in path:
            before = self._add_node(before, self._nodes[place]["message"])
        return before

    def _describe_call(self, exchange: Exchange, node: int | None) -> dict[str, Any]:
        reply = parse_reply(exchange) if exchange.complete else None
        head = self._tree.head(exchange.number)
        call: dict[str, Any] = {
            "node": node,
            "model": as_string(head.get("model")) or None,
            "endpoint": f"/{find_dialect(exchange.dialect).path}",
            "time": {"start": exchange.started, "end": exchange.started + exchange.seconds},
        }
        if reply is None:
            error = exchange.error or f"status {exchange.status}"
            return {**call, "error": {"type": "ProviderError", "message": error}}
        finish = _FINISHES.get(reply.finish)
        used = exchange.usage if exchange.usage.requests else exchange.saved
        return {**call, "finish_reason": finish, "usage": describe_usage(used)}

    def _list_tools(self, exchange: Exchange) -> Iterator[dict[str, Any]]:
        for tool in find_dialect(exchange.dialect).parse_tools(self._tree.head(exchange.number)):
            function = as_dict(tool.get("function"))
            yield {
                "name": as_string(function.get("name")),
                "description": as_string(function.get("description")),
                "parameters": as_dict(function.get("parameters")),
            }


def describe_usage(usage: ModelUsage) -> dict[str, Any]:
    """Return the usage of a call; their `prompt_tokens` are without the cached ones."""
    return {
        "prompt_tokens": usage.input_tokens - usage.cached_tokens,
        "completion_tokens": usage.output_tokens,
        "cached_input_tokens": usage.cached_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "cost": usage.cost,
    }


def convert_message(node: MessageNode) -> Iterator[dict[str, Any]]:
    """Yield the message of a node in the typed form of the wire; content that it cannot have is left out."""
    for common in _parse_node(node):
        if common.role != "unknown":
            yield _type_message(common, _find_arguments(node.message))


def _parse_node(node: MessageNode) -> list[CommonMessage]:
    if isinstance(node.message, str):
        return [CommonMessage(role=node.role, parts=(node.message,))]
    dialect = find_dialect(node.dialect)
    messages = dialect.parse_messages(node.message if isinstance(node.message, list) else [node.message])
    if node.role != "system" or all(message.role == "system" for message in messages):
        return messages
    # A prompt outside the list of messages has a form of its own.
    for key in dialect.system_keys:
        prompt = [
            message for message in dialect.parse_system({key: node.message}) if message.role == "system"
        ]
        if prompt:
            return prompt
    return []


def _type_message(common: CommonMessage, arguments: dict[str, str]) -> dict[str, Any]:
    chat = to_chat_message(common)
    if common.role == "assistant":
        calls = [as_dict(call.get("function")) | {"id": call["id"]} for call in chat.get("tool_calls", ())]
        made: dict[str, Any] = {"role": "assistant", "content": common.text or None}
        if common.reasoning:
            made["reasoning_content"] = common.reasoning
        if calls:
            made["tool_calls"] = [
                {**call, "arguments": arguments.get(call["id"], call["arguments"])} for call in calls
            ]
        return made
    made = {"role": common.role, "content": _pick_content(chat["content"])}
    if common.role == "tool":
        made["tool_call_id"] = common.answers
        if common.tool:
            made["name"] = common.tool
    return made


def _pick_content(content: Any) -> Any:
    """Return a text, or the parts that the wire has: texts and images."""
    if not isinstance(content, list):
        return content or ""
    return [part for part in content if part.get("type") in ("text", "image_url")]


def _find_arguments(message: Any) -> dict[str, str]:
    """Return the arguments of tool calls as the model wrote them, by the call's id."""
    calls = [as_dict(call) for call in as_list(as_dict(message).get("tool_calls"))]
    return {
        as_string(call.get("id")): as_string(as_dict(call.get("function")).get("arguments"))
        for call in calls
        if isinstance(as_dict(call.get("function")).get("arguments"), str)
    }
