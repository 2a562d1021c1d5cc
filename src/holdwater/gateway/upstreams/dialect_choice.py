"""The upstream that finds out which dialects a server has, by the agent's own calls.

The first call of a dialect goes out unchanged. If the server has no such path, the same call goes out again,
translated, and so do all later ones. No request is made for the question alone: a run whose server has the
dialect sends what it would send anyway. `translation.py` translates.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple

from ...core.errors import ModelFailed
from ...core.summary import TRANSLATED
from ...dialect import DIALECTS, list_conversations
from . import Upstream, UpstreamAnswer, UpstreamCall
from .retry import ABSENT
from .translation import TranslatedUpstream, TranslationTerms

Send = Callable[[UpstreamCall], AbstractAsyncContextManager[UpstreamAnswer]]


class DialectRoute(NamedTuple):
    """A way in which the calls of a dialect can be sent."""

    target: str  # the dialect that the server gets
    send: Send


class AdaptiveUpstream:
    """Implements `Upstream`: the calls of a dialect stay as they are where the server has that dialect."""

    def __init__(self, server: Upstream, terms: TranslationTerms) -> None:
        self._server = server
        self._note = terms.note
        targets = [d for d in DIALECTS.values() if d.translates and d.name in server.dialects]
        self._translators = {d.name: TranslatedUpstream(server, d, terms) for d in targets}
        self._chosen: dict[str, DialectRoute] = {}  # by the agent's dialect; bound: the dialects
        self._conversations = list_conversations()
        self.dialects = server.dialects | (self._conversations if targets else frozenset())

    @property
    def counting(self) -> frozenset[str]:
        """The dialects whose calls are not known to be translated."""
        return frozenset(d for d in self._server.counting if self._chosen.get(d, (d,))[0] == d)

    def send(self, call: UpstreamCall) -> AbstractAsyncContextManager[UpstreamAnswer]:
        if call.delta is None or call.dialect not in self._conversations:
            return self._server.send(call)
        known = self._chosen.get(call.dialect)
        return self._find_route(call) if known is None else known.send(call)

    @asynccontextmanager
    async def _find_route(self, call: UpstreamCall) -> AsyncIterator[UpstreamAnswer]:
        """Send a call by the first route for which the server has the path; it serves later calls, too."""
        refusal: UpstreamAnswer | None = None  # the first; `http.py` has read it whole
        body = b""
        for route in self._list_routes(call.dialect):
            async with route.send(call._replace(trial=True)) as answer:
                if answer.status not in ABSENT:
                    if answer.failure is None:
                        self._choose(call, route, refusal)
                    yield answer
                    return
            refusal = refusal or answer
            if not body and not call.body.at_hand:
                message = "the server does not have the agent's dialect, and the request was not kept"
                raise ModelFailed(message, "name the server's dialect: `--upstream-dialect`", kind="dialect")
            body = body or call.body.to_bytes()
            call.body.replace((body,))
        assert refusal is not None, "the relay has checked the dialect"
        yield refusal

    def _list_routes(self, dialect: str) -> list[DialectRoute]:
        others = [DialectRoute(d, t.translate) for d, t in self._translators.items() if d != dialect]
        if dialect not in self._server.dialects:
            return others[:1]
        return [DialectRoute(dialect, self._server.send), *others]

    def _choose(self, call: UpstreamCall, route: DialectRoute, refusal: UpstreamAnswer | None) -> None:
        known = self._chosen.setdefault(call.dialect, route)
        if known is route and route.target != call.dialect:
            path = call.path.partition("?")[0]
            why = f"it answered {refusal.status} to `{path}`" if refusal else "no URL is set for the dialect"
            sentence = f"calls in `{call.dialect}` go to the server as `{route.target}`: {why}"
            self._note(TRANSLATED, sentence)
