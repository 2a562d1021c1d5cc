"""Token sequences of a trajectory, with the mask of what was sampled, where the upstream gave token ids.

Ids are never guessed: they are those of the replies. Which replies there are is said by `trajectory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core.records import Record
from . import dialects
from .nodes import whole
from .trajectory import Tree, reply_of


class Tokens(Record, frozen=True):
    """A sequence that the model saw and wrote; three lists of the same length."""

    ids: list[int]
    mask: list[int]  # 1: the model said it
    logprobs: list[float] | None  # 0.0 where the mask is 0; None: they were not given for every sampled token


def sequences(tree: Tree, *, beside: bool = False) -> Iterator[Tokens]:
    """The main thread from its first prompt on, or every thread; each sampled token is in one of them.

    A new one begins where a prompt does not begin with all that came before: the history was rewritten, or is
    cut into other tokens now.
    """
    for thread in tree.threads()[: None if beside else 1]:
        growing = _Sequence()
        for number in thread.numbers:
            exchange = tree.exchange(number)
            tokens = reply_of(exchange).tokens if whole(exchange) else dialects.Tokens()
            if tokens.prompt and tokens.completion:
                if not growing.continues(tokens):
                    yield growing.made()
                    growing = _Sequence()
                growing.add(tokens)
        if growing:
            yield growing.made()


class _Sequence:
    """One that grows turn by turn; bound: what fits into the model's context."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._logprobs: list[float] | None = []

    def __bool__(self) -> bool:
        return bool(self._ids)

    def continues(self, tokens: dialects.Tokens) -> bool:
        return list(tokens.prompt[: len(self._ids)]) == self._ids

    def add(self, tokens: dialects.Tokens) -> None:
        new = tokens.prompt[len(self._ids) :]
        self._ids += [*new, *tokens.completion]
        self._mask += [0] * len(new) + [1] * len(tokens.completion)
        given = [p for p in tokens.logprobs if p is not None]
        if self._logprobs is not None and len(given) == len(tokens.logprobs) == len(tokens.completion):
            self._logprobs += [0.0] * len(new) + given
        else:
            self._logprobs = None

    def made(self) -> Tokens:
        return Tokens(self._ids, self._mask, self._logprobs)
