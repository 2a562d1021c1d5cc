"""Exchanges with a model, and the interfaces of their stores.

The gateway appends each exchange to an `ExchangeLog`, and takes replies of earlier attempts from a
`ReplyRecording`. `ledger/exchanges.py` and `conversation/earlier_replies.py` implement them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from .records import NO_USAGE, ModelUsage, Record

# The names under which the model calls of a grader and of a group's hook are recorded: no agent made them.
GRADER_BORROWER, GROUP_BORROWER = SCORING_BORROWERS = ("grader", "group")


class Exchange(Record, frozen=True):
    """One model request and its reply.

    Only the part of the request that differs from its parent is stored.
    """

    number: int  # 1, 2, 3, ... within the attempt
    parent: int | None  # the exchange whose messages are a prefix of this request
    keep: int  # number of the parent's messages that it keeps
    append: tuple[msgspec.Raw, ...]  # the messages that follow
    head: msgspec.Raw | None  # all other keys of the request; None: equal to the parent's
    reply: msgspec.Raw | None  # the complete reply as JSON, also for a stream
    status: int
    dialect: str = "chat"
    streamed: bool = False
    usage: ModelUsage = NO_USAGE
    error: str = ""
    started: float = 0.0  # seconds since the epoch
    seconds: float = 0.0
    identity: str = ""  # equal for equal requests, in any attempt
    saved: ModelUsage = NO_USAGE  # replaces `usage` if the reply was replayed from an earlier attempt
    version: str = ""  # version of the policy that answered, if the upstream reports it
    by: str = ""  # the child attempt that made the call; empty: the attempt itself
    # The chunks of a stream as a JSON array, for the dialect whose clients keep them apart (Gemini).
    chunks: msgspec.Raw | None = None
    # The reply as the upstream sent it, if it was translated to the dialect of the agent.
    original: msgspec.Raw | None = None

    @property
    def complete(self) -> bool:
        """Whether the reply is complete: an interrupted reply was not sampled to its end."""
        return self.status == 200 and not self.error and self.reply is not None


class ExchangeLog(Protocol):
    """The gateway's store: the segment of one attempt, and the run's blobs."""

    def append(self, exchange: Exchange) -> None:
        """Write the exchange so that it survives kill -9."""

    def blob(self, content: bytes) -> str:
        """Store `content` once in the run; return its hash."""

    def read(self, number: int) -> Exchange:
        """Return a written exchange from the record."""


HeadChanges = Mapping[str, msgspec.Raw | None]
"""Keys of a request beside its messages, with other values; None: the request does not have the key."""

NO_CHANGES: HeadChanges = MappingProxyType({})


class RecordedReply(NamedTuple):
    """A recorded reply, which has been paid for already."""

    reply: bytes  # JSON
    usage: ModelUsage
    version: str = ""  # version of the policy that generated it
    chunks: bytes | None = None  # as in `Exchange`
    attempt: int = 0  # the attempt that made the exchange
    number: int = 0  # number of the exchange
    changes: HeadChanges = NO_CHANGES  # what the recorded request has in place of the call's own values
    drifted: bool = False  # the call differs from the recorded one
    refused: str = ""  # why the call fails, and gets no reply
    unlimited: bool = False  # does not count against the limits of the attempt
    original: bytes | None = None  # as in `Exchange`


class RepeatedRequest(NamedTuple):
    """A request that may be in the record."""

    identity: str
    dialect: str
    messages: int
    head: Mapping[str, msgspec.Raw]
    identify: Callable[[HeadChanges], str]  # returns its identity with changed keys


class DriftedCall(NamedTuple):
    """A replayed call that differs from the recorded call whose reply it received."""

    identity: str  # identity of the replayed call
    attempt: int  # attempt of the recorded call
    number: int


class ReplyRecording(Protocol):
    """The replies of earlier attempts at the same sample."""

    @property
    def unrepeated(self) -> str:
        """Why an attempt that ends now has not repeated what it had to; empty: it has."""

    def take(self, request: RepeatedRequest) -> RecordedReply | None:
        """Return the reply to an equal request; equal requests get their replies once each, in order."""

    def change_live(self, request: RepeatedRequest) -> HeadChanges:
        """Return the keys to change in a request that no recorded reply answers."""

    def nearest(self, dialect: str, messages: int) -> RecordedReply | None:
        """Return an unused reply to a request with the same number of messages."""
