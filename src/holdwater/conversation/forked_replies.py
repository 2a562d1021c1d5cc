"""Gives the recorded replies of another run's attempt again, up to the turn after which a fork goes on.

A request is the recorded one if it is equal in all but the keys that the gateway itself sets: the model, the
sampling parameters, the seed. Until the last repeated turn has its reply, any other request is a drift.
`earlier_replies.py` has the replies of earlier attempts of the fork itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from ..core.errors import BadInput, HoldwaterError, ModelFailed
from ..core.exchange import (
    Exchange,
    HeadChanges,
    RecordedReply,
    RepeatedRequest,
    ReplyRecording,
)
from ..core.fork_origin import SEED_STRIDE, ForkOrigin
from ..core.records import NO_USAGE, Attempt, ModelUsage
from ..dialect import find_dialect
from ..dialect.conversion import ReplyContext
from ..dialect.message import SHAPE_ERRORS
from ..ledger.directory import RunDirectory
from .earlier_replies import ReplyKey, load_reply
from .trajectory import ExchangeTree, parse_reply

SEED = "seed"
IMPOSED_KEYS = ("model", SEED)  # and the parameters of `--sampling`
_UNLIKE_ANY = "\0"  # a value that no parameter has: every parameter that is imposed then shows as a change


class RepeatedTurn(NamedTuple):
    """A recorded exchange, without its contents."""

    number: int
    dialect: str
    messages: int
    identity: str


class ForkedReplies:
    """Implements `core.exchange.ReplyRecording` for one attempt of a fork."""

    def __init__(
        self,
        origin: ForkOrigin,
        sampling: Mapping[str, Any],
        attempt: Attempt,
        earlier: ReplyRecording | None = None,
    ) -> None:
        """`earlier` has the replies of earlier attempts of the fork itself."""
        self._origin = origin
        self._sampling = dict.fromkeys(sampling, _UNLIKE_ANY)
        self._shift = SEED_STRIDE * (attempt.sample + 1) + attempt.round - 1
        self._earlier = earlier
        self._diverged = ""
        try:
            self._tree = ExchangeTree(RunDirectory.open(origin.directory), origin.attempt)
            turns = list(list_repeated(self._tree, origin.turn))
        except HoldwaterError as error:
            message = f"the forked attempt cannot be read: {error.message}"
            raise ModelFailed(message, error.hint, kind="unrecorded", again=False) from error
        # Bound of both: the exchanges of the forked attempt.
        self._left = {turn.number: turn for turn in turns}
        self._by_length: dict[ReplyKey, list[RepeatedTurn]] = {}
        for turn in turns:
            self._by_length.setdefault((turn.dialect, turn.messages), []).append(turn)
        self._total = len(turns)

    @property
    def unrepeated(self) -> str:
        if self._diverged or not self._repeats:
            return self._diverged
        done = self._total - len(self._left)
        return f"the agent ended before turn {self._origin.turn}: it made {done} of {self._total} calls"

    @property
    def _repeats(self) -> bool:
        """Whether the last turn to repeat has no reply yet."""
        return self._origin.turn in self._left

    def take(self, request: RepeatedRequest) -> RecordedReply | None:
        if self._diverged:
            return self._refuse(self._diverged)
        known = self._by_length.get((request.dialect, request.messages), ())
        alike = [turn for turn in known if turn.number in self._left]
        for turn in alike:
            changes = self._find_changes(turn, request)
            if (request.identify(changes) if changes else request.identity) == turn.identity:
                return self._repeat(turn, request)._replace(changes=changes)
        # Estimated token counts are in no record, and a real one costs nothing.
        if self._repeats and not find_dialect(request.dialect).counted_dialect:
            expected = alike[0] if alike else next(iter(self._left.values()))
            if not self._origin.drift:
                self._diverged = (
                    f"the fork drifts at turn {expected.number}, before turn {self._origin.turn} is repeated"
                )
                refusal = self._refuse(self._diverged)
                return refusal._replace(drifted=True, number=expected.number)
            if alike:
                return self._repeat(expected, request)._replace(drifted=True)
        live = self.change_live(request)
        found = self._take_earlier(request, request.identify(live) if live else request.identity)
        return None if found is None else found._replace(changes=live)

    def nearest(self, dialect: str, messages: int) -> RecordedReply | None:
        return None  # `take` decides about requests that drift

    def change_live(self, request: RepeatedRequest) -> HeadChanges:
        """Return another seed for a live call: branches with one seed would all say the same."""
        seed = msgspec.json.decode(request.head.get(SEED, b"null"))
        return {SEED: Raw(b"%d" % (seed + self._shift))} if isinstance(seed, int) else {}

    def _find_changes(self, turn: RepeatedTurn, request: RepeatedRequest) -> HeadChanges:
        """Return the keys that the gateway sets, as far as the recorded request has other values."""
        recorded = msgspec.json.decode(self._tree.raw_head(turn.number), type=dict[str, Raw])
        imposed = find_dialect(turn.dialect).impose_sampling(recorded, self._sampling)
        return {
            key: recorded.get(key)
            for key in (*IMPOSED_KEYS, *imposed)
            if bytes(recorded.get(key, b"")) != bytes(request.head.get(key, b""))
        }

    def _repeat(self, turn: RepeatedTurn, request: RepeatedRequest) -> RecordedReply:
        """Return the recorded reply, or the reply that the fork has in its place."""
        del self._left[turn.number]
        self._take_earlier(request, turn.identity)  # an earlier attempt of the fork repeated it as well
        exchange = self._tree.exchange(turn.number)
        found = load_reply(exchange, self._origin.attempt, self._tree.blobs)._replace(unlimited=True)
        if turn.number != self._origin.turn:
            return found
        if self._origin.say is not None:
            said = render_said(exchange, self._origin.say)
            return found._replace(reply=said, chunks=None, usage=ModelUsage(requests=1))
        if self._origin.then_say is not None:
            reply = msgspec.json.decode(found.reply)
            find_dialect(turn.dialect).append_text(reply, self._origin.then_say)
            return found._replace(reply=msgspec.json.encode(reply), chunks=None)
        return found

    def _take_earlier(self, request: RepeatedRequest, identity: str) -> RecordedReply | None:
        return None if self._earlier is None else self._earlier.take(request._replace(identity=identity))

    def _refuse(self, reason: str) -> RecordedReply:
        return RecordedReply(b"null", NO_USAGE, refused=reason, unlimited=True, attempt=self._origin.attempt)


def list_repeated(tree: ExchangeTree, turn: int) -> Iterator[RepeatedTurn]:
    """Yield the complete exchanges that a fork after `turn` repeats, in order.

    They are the exchanges up to `turn`, and the calls beside them that had begun when its reply was there.
    """
    if not turn:
        return
    last = tree.exchange(turn)
    end = last.started + last.seconds
    following = {turn}  # the exchanges that continue the last one
    for number in tree.numbers():
        exchange = tree.exchange(number)
        if exchange.parent in following:
            following.add(number)
        elif exchange.complete and exchange.identity and (number <= turn or exchange.started < end):
            messages = exchange.keep + len(exchange.append)
            yield RepeatedTurn(number, exchange.dialect, messages, exchange.identity)


def check_turn(tree: ExchangeTree, turn: int) -> None:
    """Raise BadInput if an attempt cannot be forked after a turn."""
    threads = tree.threads()
    main = threads[0].numbers if threads else ()
    if turn == 0:
        return
    if turn not in main:
        place = tree.find_thread(turn).place  # raises for a turn that the attempt does not have
        hint = f"the nearest turns are {_name_neighbours(main, turn)}" if main else ""
        raise BadInput(f"turn {turn} is not on the main thread, but on side thread {place}", hint)
    if not tree.exchange(turn).complete:
        raise BadInput(f"turn {turn} has no complete reply", "fork at an earlier turn")


def check_append(tree: ExchangeTree, turn: int, text: str) -> None:
    """Raise BadInput if the reply of a turn has no place for a further text."""
    exchange = tree.exchange(turn)
    try:
        find_dialect(exchange.dialect).append_text(msgspec.json.decode(exchange.reply or b"null"), text)
    except SHAPE_ERRORS:
        raise BadInput(
            f"the reply of turn {turn} has no place for a text", "replace it with `--say`"
        ) from None


def _name_neighbours(turns: tuple[int, ...], turn: int) -> str:
    before, after = [n for n in turns if n < turn], [n for n in turns if n > turn]
    return " and ".join(str(number) for number in (*before[-1:], *after[:1]))


def render_said(exchange: Exchange, text: str) -> bytes:
    """Return a reply that says `text`, in the dialect of an exchange."""
    model = parse_reply(exchange).model
    message = {"role": "assistant", "content": text}
    completion = {
        "id": f"chatcmpl-fork-{exchange.number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }
    return find_dialect(exchange.dialect).reply_from_chat(completion, ReplyContext(model))
