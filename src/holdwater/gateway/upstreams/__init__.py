"""Where calls go: the seam between the gateway and whatever answers. `http.py` is the first upstream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import NamedTuple, Protocol

from multidict import CIMultiDict

from ...core.records import Failure
from ..body import Body
from ..dialects import Manner
from ..recorder import Delta


class Call(NamedTuple):
    """One request on its way up."""

    path: str  # below the upstream's base URL for the dialect, for example `chat/completions`; with the query
    headers: Mapping[str, str]  # the client's own, without its key and without those of its connection
    body: Body
    waiting: Callable[
        [], AbstractContextManager[None]
    ]  # entered while the upstream's rate limit is waited for
    dialect: str = "chat"
    attempt: int = 0
    manner: Manner = Manner.WHOLE
    delta: Delta | None = None  # what is new in it; None: it is no turn


class Answer(Protocol):
    """What came back, from its first byte on."""

    status: int
    headers: CIMultiDict[str]  # those that may go on to the client
    failure: Failure | None  # what the status means for the attempt
    version: str | None  # of the policy, where it says so; known when the body is
    waits: bool  # its body may take long to begin: a client that reads events is kept alive meanwhile

    def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives; raises `ModelFailed` if it breaks off."""


class Upstream(Protocol):
    """Answers calls."""

    @property
    def dialects(self) -> frozenset[str]:
        """The names of those that it speaks."""

    @property
    def counts(self) -> bool:
        """Whether it may know how many tokens a request has."""

    def send(self, call: Call) -> AbstractAsyncContextManager[Answer]:
        """Pass `call` on; raises `ModelFailed` if there is no answer. Leaving the context cancels it."""
