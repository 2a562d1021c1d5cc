"""Decides which prompt continues which earlier tokens, so that each id of a conversation is kept once.

`nodes.py` passes it the messages of an attempt in order; `core/token_sequences.py` builds sequences from its
decisions. Ids are compared as bytes, in O(prompt). The state is O(new ids).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..core.serving_protocol import MessageNode
from ..core.token_sequences import ID_SIZE, SequenceStart


class PromptDelta(NamedTuple):
    """A prompt: the first `shared` ids of the prompt and the reply of the node `follows`, and then `new`."""

    follows: int | None
    shared: int
    new: tuple[int, ...]
    start: SequenceStart | None  # why it begins another sequence; None: it continues that of `follows`


class PromptHistory:
    """The messages and ids of one attempt so far."""

    def __init__(self) -> None:
        self._places: dict[int, _MessagePlace] = {}  # by node; bound: the messages of one attempt
        self._newest: dict[str, _KnownSequence] = {}  # by child attempt
        self._last: _KnownSequence | None = None

    def add_message(self, node: int, parent: int | None, role: str, *, sampled: bool = False) -> None:
        """Add a message after its parent."""
        before = self._places[parent] if parent is not None else _NOTHING
        self._places[node] = _MessagePlace(
            parent=parent,
            ids=before.ids,
            altered=before.altered or (role == "assistant" and not sampled),
            begun=before.begun or role != "system",
        )

    def add_reply(self, node: int, by: str, prompt: Sequence[int], tokens: Sequence[int]) -> PromptDelta:
        """Add the ids of a sampled message, which was added before. `by` is its child attempt."""
        prompt_ids = array("I", prompt).tobytes()
        near = self._find_used(node)
        base, shared = self._find_base(near.sequence if near else None, by, prompt_ids)
        follows = base.find_reply(shared) if base is not None and shared else None
        start = None
        if base is None or shared < len(base) or base.by != by:
            start = self._explain_start(node, by, shared, len(prompt))
            base = _KnownSequence(base if shared else None, shared, by)
        base.add_reply(node, prompt_ids[shared * ID_SIZE :] + array("I", tokens).tobytes())
        self._mark_used(node, base)
        self._newest[by] = self._last = base
        return PromptDelta(follows, shared, tuple(prompt[shared:]), start)

    def _find_base(
        self, near: _KnownSequence | None, by: str, prompt: bytes
    ) -> tuple[_KnownSequence | None, int]:
        """Return the sequence that the prompt continues, or shares the longest beginning with."""
        base, most = None, 0
        for sequence in dict.fromkeys((near, self._newest.get(by), self._last)):
            if sequence is None:
                continue
            shared = sequence.count_shared(prompt)
            if shared == len(sequence) and sequence.by == by:
                return sequence, shared
            if shared > most:
                base, most = sequence, shared
        return base, most

    def _explain_start(self, node: int, by: str, shared: int, length: int) -> SequenceStart:
        """Return why a prompt of `length` ids does not continue the sequence whose first ids it shares."""
        place, near = self._places[node], self._find_used(node)
        if by not in self._newest:
            return SequenceStart.CHILD if by else SequenceStart.FIRST
        if shared == length:
            return SequenceStart.BRANCH
        if place.ids and not place.altered:
            return SequenceStart.BRANCH if shared >= place.ids else SequenceStart.RETOKENIZED
        return SequenceStart.REWRITTEN if near is not None and near.begun else SequenceStart.RESTARTED

    def _find_used(self, node: int) -> _MessagePlace | None:
        """Return the last message before a reply that an earlier prompt contains."""
        at = self._places[node].parent
        while at is not None:
            place = self._places[at]
            if place.sequence is not None:
                return place
            at = place.parent
        return None

    def _mark_used(self, node: int, sequence: _KnownSequence) -> None:
        place = self._places[node]
        place.ids, place.altered = len(sequence), False
        at: int | None = node
        while at is not None and self._places[at].sequence is not sequence:
            self._places[at].sequence = sequence
            at = self._places[at].parent


class _MessagePlace:
    """A message of a conversation, and the tokens that belong to it."""

    __slots__ = ("altered", "begun", "ids", "parent", "sequence")

    def __init__(self, parent: int | None, ids: int, *, altered: bool, begun: bool) -> None:
        self.parent = parent
        self.ids = ids  # up to the end of the last reply with ids; 0: there is none
        self.altered = altered  # an assistant message follows that reply that no model sampled
        self.begun = begun  # the conversation has more than system prompts
        self.sequence: _KnownSequence | None = None  # the newest whose prompt contains the message


_NOTHING = _MessagePlace(None, 0, altered=False, begun=False)


class _KnownSequence:
    """The ids of a sequence: the first `shared` ids of `base`, and its own."""

    def __init__(self, base: _KnownSequence | None, shared: int, by: str) -> None:
        self.by = by
        self._base = base
        self._shared = shared
        self._own = b""
        self._ends: list[int] = []  # of each reply: the number of ids up to its end
        self._replies: list[int] = []

    def __len__(self) -> int:
        return self._shared + len(self._own) // ID_SIZE

    def add_reply(self, node: int, ids: bytes) -> None:
        self._own += ids
        self._ends.append(len(self))
        self._replies.append(node)

    def count_shared(self, prompt: bytes) -> int:
        """Return the number of ids that the sequence and the prompt both begin with."""
        shared, end, at = len(self), len(self), self
        while True:
            own = memoryview(at._own)[: max(0, end - at._shared) * ID_SIZE]
            equal = _count_equal(prompt, at._shared * ID_SIZE, own)
            if equal < len(own) // ID_SIZE:
                shared = at._shared + equal
            if at._base is None:
                return shared
            end, at = min(end, at._shared), at._base

    def find_reply(self, end: int) -> int:
        """Return the first reply up to whose end there are at least `end` ids."""
        at = self
        while at._base is not None and end <= at._shared:
            at = at._base
        return at._replies[bisect_left(at._ends, end)]


def _count_equal(prompt: bytes, start: int, ids: memoryview) -> int:
    """Return how many of these ids the prompt has from byte `start` on."""
    if prompt.startswith(ids, start):
        return len(ids) // ID_SIZE
    low, high = 0, len(ids) // ID_SIZE  # the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        part = ids[low * ID_SIZE : middle * ID_SIZE]
        if prompt.startswith(part, start + low * ID_SIZE):
            low = middle
        else:
            high = middle
    return low


def restore_prompt(node: MessageNode, nodes: Mapping[int, MessageNode]) -> list[int]:
    """Return all ids of the prompt of a sampled message; none if they are not known."""
    parts = [node.prompt_delta or ()]
    end, at = node.shared, node.follows
    while at is not None:
        before = nodes[at]
        own = (*(before.prompt_delta or ()), *(before.tokens or ()))
        parts.append(own[: max(0, end - before.shared)])
        end, at = min(end, before.shared), before.follows
    return [number for part in reversed(parts) for number in part]
