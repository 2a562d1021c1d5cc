"""Builds token sequences of a trajectory with a mask of sampled tokens, if the upstream returned token ids.

Ids are taken from the replies and never computed. `trajectory.py` reads the replies.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core.records import Record
from ..dialect.message import ReplyTokens
from .nodes import is_complete
from .trajectory import ExchangeTree, parse_reply


class TokenSequence(Record, frozen=True):
    """A sequence of prompt and sampled tokens; three lists of the same length."""

    ids: list[int]
    mask: list[int]  # 1: sampled by the model
    logprobs: list[float] | None  # 0.0 where the mask is 0; None: not returned for every sampled token


def build_sequences(tree: ExchangeTree, *, beside: bool = False) -> Iterator[TokenSequence]:
    """Yield the sequences of the trajectory, or with `beside` of every thread; each sampled token is in one.

    A new sequence begins where a prompt does not extend the sequence so far: the history was rewritten, or is
    tokenized differently now.
    """
    for thread in tree.threads()[: None if beside else 1]:
        growing = _SequenceBuilder()
        for number in thread.numbers:
            exchange = tree.exchange(number)
            tokens = parse_reply(exchange).tokens if is_complete(exchange) else ReplyTokens()
            if tokens.prompt and tokens.completion:
                if not growing.continues(tokens):
                    yield growing.build()
                    growing = _SequenceBuilder()
                growing.add(tokens)
        if growing:
            yield growing.build()


class _SequenceBuilder:
    """A sequence that grows turn by turn; bound: the model's context."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._logprobs: list[float] | None = []

    def __bool__(self) -> bool:
        return bool(self._ids)

    def continues(self, tokens: ReplyTokens) -> bool:
        return list(tokens.prompt[: len(self._ids)]) == self._ids

    def add(self, tokens: ReplyTokens) -> None:
        new = tokens.prompt[len(self._ids) :]
        self._ids += [*new, *tokens.completion]
        self._mask += [0] * len(new) + [1] * len(tokens.completion)
        given = [p for p in tokens.logprobs if p is not None]
        if self._logprobs is not None and len(given) == len(tokens.logprobs) == len(tokens.completion):
            self._logprobs += [0.0] * len(new) + given
        else:
            self._logprobs = None

    def build(self) -> TokenSequence:
        return TokenSequence(self._ids, self._mask, self._logprobs)
