"""Token sequences, the input of a trainer: ids, mask and log probabilities of a rollout as packed arrays.

A sequence is a conversation as the model saw it. A prompt that does not continue an earlier sequence begins
another one. `conversation/prompt_deltas.py` decides which prompt continues which earlier tokens, and notes
it in the message nodes from which sequences are built here.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from msgspec.structs import replace

from .record import Record

if TYPE_CHECKING:
    from .serving_protocol import MessageNode

ID_SIZE = array("I").itemsize  # bytes of a token id, and of a log probability


class TokenServer(StrEnum):
    """The kind of server that is asked for token ids: each kind has fields of its own."""

    NONE = "none"  # no ids are asked for
    AUTO = "auto"  # the fields of all kinds, unless the server refuses them
    VLLM = "vllm"
    SGLANG = "sglang"
    NEMO = "nemo"


class SequenceStart(StrEnum):
    """The reason why a sequence does not continue an earlier one."""

    FIRST = "first"  # the first call of the attempt
    CHILD = "child"  # the first call of a child attempt
    BRANCH = "branch"  # another reply to the same prompt, or another continuation of the same tokens
    RETOKENIZED = "retokenized"  # the messages are the same, and their ids are not
    REWRITTEN = (
        "rewritten"  # the agent changed or left out messages and kept others, by compaction for example
    )
    RESTARTED = "restarted"  # no message of an earlier conversation: a side call, or a compacted history

    @property
    def is_break(self) -> bool:
        """Whether the same conversation goes on in other tokens."""
        return self in (SequenceStart.RETOKENIZED, SequenceStart.REWRITTEN, SequenceStart.RESTARTED)


class TokenSpan(Record, frozen=True, array_like=True):
    """Adjacent tokens of a sequence: a sampled reply, or the part of a prompt before one."""

    start: int
    stop: int
    exchange: int  # number of the model call
    sampled: bool = False
    version: str = ""  # of the policy that sampled it
    finish: str = ""
    messages: tuple[int, ...] = ()  # ids of the message nodes


class PackedSequence(Record, frozen=True, array_like=True):
    """A sequence on the wire: its ids after the first `shared` ids of the sequence `base`.

    Numbers have four bytes each, the lowest first. The spans of a branch cover only the ids of its own.
    """

    reason: SequenceStart
    by: str
    base: int | None  # index of an earlier sequence
    shared: int
    ids: bytes
    logprobs: bytes  # for each sampled token; NaN: the upstream sent none
    spans: tuple[TokenSpan, ...]


class SampledTurn(NamedTuple):
    """One sampled reply of a sequence, with its whole prompt."""

    prompt: array[int]
    completion: array[int]
    logprobs: array[float]
    version: str
    finish: str


class TokenSequence(Record, frozen=True):
    """The tokens of a conversation; three arrays of the same length.

    Each sampled token of a rollout has the mask 1 in exactly one of its sequences.
    """

    ids: array[int]
    mask: array[int]  # 1: sampled by the model in this sequence
    logprobs: array[float]  # 0.0 where the mask is 0; NaN: the upstream sent none
    spans: tuple[TokenSpan, ...]  # they cover all ids, in order
    reason: SequenceStart
    by: str = ""  # the child attempt that made the calls; empty: the attempt itself

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def prompt(self) -> int:
        """The number of tokens before the first sampled one."""
        return next((span.start for span in self.spans if span.sampled), len(self.ids))

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions of the policy that sampled it, each once, the first first."""
        return tuple(dict.fromkeys(span.version for span in self.spans if span.sampled))

    @property
    def complete(self) -> bool:
        """Whether every sampled token has a finite log probability."""
        return all(map(math.isfinite, self.logprobs))

    def turns(self) -> Iterator[SampledTurn]:
        """Yield each sampled reply as a row of its own. All prompts together are O(turns x tokens)."""
        for span in self.spans:
            if span.sampled:
                yield SampledTurn(
                    prompt=self.ids[: span.start],
                    completion=self.ids[span.start : span.stop],
                    logprobs=self.logprobs[span.start : span.stop],
                    version=span.version,
                    finish=span.finish,
                )


def build_sequences(nodes: Iterable[MessageNode]) -> list[TokenSequence]:
    """Return the sequences of a rollout, in the order in which they begin; none without ids."""
    packing = SequencePacking()
    for node in nodes:
        packing.add(node)
    return unpack_sequences(packing.build())


def unpack_sequences(packed: Iterable[PackedSequence]) -> list[TokenSequence]:
    sequences: list[TokenSequence] = []
    for sequence in packed:
        sequences.append(_unpack(sequence, sequences))
    return sequences


def _unpack(packed: PackedSequence, before: list[TokenSequence]) -> TokenSequence:
    ids, sampled = _unpack_numbers("I", packed.ids), _unpack_numbers("f", packed.logprobs)
    spans = packed.spans
    if packed.base is not None:
        base = before[packed.base]
        ids = base.ids[: packed.shared] + ids
        spans = (*_cut_spans(base.spans, spans[0].start), *spans)
    mask, logprobs = array("B", bytes(len(ids))), array("f", bytes(ID_SIZE * len(ids)))
    taken = 0
    for span in packed.spans:
        if span.sampled:
            count = span.stop - span.start
            mask[span.start : span.stop] = array("B", b"\1" * count)
            logprobs[span.start : span.stop] = sampled[taken : taken + count]
            taken += count
    return TokenSequence(ids, mask, logprobs, spans, packed.reason, packed.by)


def _pack_numbers(numbers: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def _unpack_numbers(kind: Literal["I", "f"], packed: bytes) -> array[Any]:
    numbers = array(kind, packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _cut_spans(spans: tuple[TokenSpan, ...], end: int) -> Iterator[TokenSpan]:
    """Yield the spans before token `end`, as parts of a prompt."""
    for span in spans:
        if span.start < end:
            yield replace(span, stop=min(span.stop, end), sampled=False)


class SequencePacking:
    """Packs the sequences of a rollout from its nodes, with one copy of each token; bound: its tokens."""

    def __init__(self) -> None:
        self._sequences: list[_GrowingSequence] = []
        self._places: dict[int, int] = {}  # sampled node -> its sequence
        self._parents: dict[int, int | None] = {}  # message node -> the node before it

    def add(self, node: MessageNode) -> None:
        """Add a node. A reply without the ids of its prompt and of its own is in no sequence."""
        self._parents[node.id] = node.parent
        if node.prompt_delta is None or not node.tokens:
            return
        base = None if node.follows is None else self._places[node.follows]
        if node.sequence_start is None:
            assert base is not None
            self._places[node.id] = base
        else:
            self._places[node.id] = len(self._sequences)
            self._sequences.append(_GrowingSequence(node, base))
        self._sequences[self._places[node.id]].add(node, self._list_messages(node))

    def build(self) -> tuple[PackedSequence, ...]:
        return tuple(growing.build() for growing in self._sequences)

    def _list_messages(self, node: MessageNode) -> tuple[int, ...]:
        """Return the nodes before a reply, after the part of the conversation that other spans have."""
        known = self._sequences[self._places[node.id]]
        branches = node.sequence_start is SequenceStart.BRANCH
        before: list[int] = []
        at = node.parent
        while at is not None and at not in (self._places if branches else known.replies):
            before.append(at)
            at = self._parents[at]
        return tuple(reversed(before))


class _GrowingSequence:
    """A sequence that grows reply by reply."""

    def __init__(self, first: MessageNode, base: int | None) -> None:
        assert first.sequence_start is not None
        self._reason = first.sequence_start
        self._by = first.by
        self._base = base
        self._shared = self._end = first.shared
        self._ids = array("I")
        self._logprobs = array("f")
        self._spans: list[TokenSpan] = []
        self.replies: set[int] = set()

    def add(self, node: MessageNode, messages: tuple[int, ...]) -> None:
        prompt, tokens = node.prompt_delta or (), node.tokens or ()
        self._ids.extend(prompt)
        self._ids.extend(tokens)
        self._logprobs.extend(_pad_logprobs(node))
        # The first prompt is one span, shared ids included. A branch has the spans of its base before it.
        begin = self._end if self._spans or self._reason is SequenceStart.BRANCH else 0
        middle = self._end + len(prompt)
        self._end = middle + len(tokens)
        if middle > begin:
            self._spans.append(TokenSpan(begin, middle, node.exchange, messages=messages))
        self._spans.append(
            TokenSpan(middle, self._end, node.exchange, True, node.version, node.finish, (node.id,))
        )
        self.replies.add(node.id)

    def build(self) -> PackedSequence:
        return PackedSequence(
            self._reason,
            self._by,
            self._base,
            self._shared,
            _pack_numbers(self._ids),
            _pack_numbers(self._logprobs),
            tuple(self._spans),
        )


def _pad_logprobs(node: MessageNode) -> list[float]:
    """Return a log probability for each token of a reply; NaN where it is not known."""
    tokens, logprobs = node.tokens or (), node.logprobs or ()
    if len(logprobs) != len(tokens):  # positions that cannot be told are unknown
        return [math.nan] * len(tokens)
    return [math.nan if logprob is None else logprob for logprob in logprobs]
