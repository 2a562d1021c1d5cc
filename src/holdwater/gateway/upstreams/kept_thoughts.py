"""Keeps the thoughts in a server's replies, and gives them back in its next requests.

Agents of other dialects cannot send them back, and some servers refuse the result of a tool without the
signed thoughts before the call. The memory is bounded; the record has the thoughts that were dropped, and
those of replies that an earlier attempt paid for.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from ...core.records import MiB
from ...dialect import CHAT
from ...dialect.interface import Dialect
from ...dialect.message import SHAPE_ERRORS, as_dict, as_list, as_string

MOST_BYTES = 32 * MiB  # of all attempts of a worker
ENTRY_BYTES = 128  # that an entry takes beside its thoughts

ReadReplies = Callable[[int], Iterable[bytes]]
"""Yields the replies of an attempt as its server sent them. It reads files: not for the event loop."""
Message = dict[str, Any]  # of Chat Completions


class AttemptThoughts:
    """The thoughts of one attempt, by hashes of the messages that they belong to; empty: it has none."""

    def __init__(self) -> None:
        self.size = ENTRY_BYTES
        self._fields: dict[int, bytes] = {}  # bound: MOST_BYTES for all attempts

    def put(self, message: Message, fields: bytes) -> None:
        for key in _hash_message(message):
            known = self._fields.get(key)
            if known is None or fields:
                self.size += len(fields) + (ENTRY_BYTES if known is None else -len(known))
                self._fields[key] = fields

    def find(self, message: Message) -> bytes | None:
        """Return the thoughts of a message; None if the message is unknown."""
        return next((self._fields[key] for key in _hash_message(message) if key in self._fields), None)


class KeptThoughts:
    """The thoughts of all attempts; those of the attempts that were quiet for longest are dropped."""

    def __init__(self, server: Dialect, read_replies: ReadReplies, bound: int = MOST_BYTES) -> None:
        self._server = server
        self._read_replies = read_replies
        self._bound = bound
        self.size = 0
        self._attempts: OrderedDict[int, AttemptThoughts] = OrderedDict()  # the longest quiet first

    def take(self, attempt: int, completion: dict[str, Any]) -> None:
        """Keep the thoughts of a reply, and remove the ones that no agent can read."""
        message = _first_message(completion)
        self._put(attempt, [(message, self._pick_fields(message))])
        for field in self._server.hidden_thoughts:
            message.pop(field, None)

    async def restore(self, attempt: int, messages: list[Message]) -> None:
        """Add the thoughts to the messages of the model."""
        spoken = [message for message in messages if as_dict(message).get("role") == "assistant"]
        if not spoken:
            return
        kept = self._attempts.get(attempt) or AttemptThoughts()
        found = [kept.find(message) for message in spoken]
        if None in found:
            recorded = await asyncio.get_running_loop().run_in_executor(None, self._read_record, attempt)
            own = [(message, b"") for message in spoken]  # the agent made the ones that are not recorded
            kept = self._put(attempt, [*recorded, *own])
            found = [kept.find(message) for message in spoken]
        for message, fields in zip(spoken, found, strict=True):
            if fields:
                message.update(msgspec.json.decode(fields))

    def _put(self, attempt: int, thoughts: list[tuple[Message, bytes]]) -> AttemptThoughts:
        kept = self._attempts.pop(attempt, None)
        if kept is None:
            kept = AttemptThoughts()
        else:
            self.size -= kept.size
        for message, fields in thoughts:
            kept.put(message, fields)
        self._attempts[attempt] = kept
        self.size += kept.size
        while self.size > self._bound and len(self._attempts) > 1:
            self.size -= self._attempts.popitem(last=False)[1].size
        return kept

    def _pick_fields(self, message: Message) -> bytes:
        fields = {name: message[name] for name in self._server.thought_fields if message.get(name)}
        return msgspec.json.encode(fields) if fields else b""

    def _read_record(self, attempt: int) -> list[tuple[Message, bytes]]:
        found: list[tuple[Message, bytes]] = []
        for reply in self._read_replies(attempt):
            try:
                message = _first_message(self._server.reply_to_chat(reply))
                found.append((message, self._pick_fields(message)))
            except SHAPE_ERRORS:
                continue  # of a server of another dialect, before the run was steered here
        return found


def _first_message(completion: dict[str, Any]) -> Message:
    choices = as_list(completion.get("choices"))
    return as_dict(as_dict(choices[0]).get("message")) if choices else {}


def _hash_message(message: Message) -> Iterator[int]:
    """Yield hashes of a message, the most exact one first: agents may give calls other ids."""
    content, calls = message.get("content"), message.get("tool_calls")
    if not calls and isinstance(content, str):
        yield hash((content.strip(),))
        return
    if calls and (name := as_string(as_dict(as_list(calls)[0]).get("id"))):
        yield hash(name)
    [common] = CHAT.parse_messages([message])
    called = ((call.name, msgspec.json.encode(call.arguments, order="sorted")) for call in common.calls)
    yield hash((common.text.strip(), *called))
