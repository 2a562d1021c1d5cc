"""A gateway between a client and the scripted model, and a log that says what was written when."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
from blake3 import blake3

from holdwater.core.exchange import Exchange
from holdwater.dialect import DIALECTS, find_dialect
from holdwater.gateway.in_process_calls import ChatClient
from holdwater.gateway.recorder import RequestDelta
from holdwater.gateway.server import Gateway
from holdwater.gateway.sessions import Session
from holdwater.gateway.upstreams import Upstream
from holdwater.gateway.upstreams.dialect_choice import AdaptiveUpstream
from holdwater.gateway.upstreams.http import HttpUpstream
from holdwater.gateway.upstreams.http_endpoint import ProviderAddress
from holdwater.gateway.upstreams.retry import CircuitBreaker
from holdwater.gateway.upstreams.translation import TranslatedUpstream, TranslationTerms
from holdwater.ledger.blobs import BlobStore, resolve_references

MODEL = "test-model"
UPSTREAM_KEY = "sk-upstream-secret"


def rebuilt(exchanges: Iterable[Exchange], blobs: Mapping[str, bytes]) -> list[Any]:
    """The requests that a record stands for, decoded."""

    def decoded(raw: msgspec.Raw) -> Any:
        return msgspec.json.decode(resolve_references(bytes(raw), cast(BlobStore, blobs)))

    made: dict[int | None, tuple[dict[str, Any], list[Any]]] = {None: ({}, [])}
    requests = []
    for exchange in exchanges:
        old_head, old = made[exchange.parent]
        head = old_head if exchange.head is None else decoded(exchange.head)
        messages = old[: exchange.keep] + [decoded(raw) for raw in exchange.append]
        made[exchange.number] = head, messages
        key = find_dialect(exchange.dialect).key
        requests.append({**head, key: messages} if messages else head)
    return requests


class Log:
    """An `ExchangeLog` in memory."""

    def __init__(self, before: Callable[[Exchange], None] = lambda exchange: None) -> None:
        self.exchanges: list[Exchange] = []
        self.blobs: dict[str, bytes] = {}
        self._before = before

    def append(self, exchange: Exchange) -> None:
        self._before(exchange)
        msgspec.json.decode(msgspec.json.encode(exchange))  # it can be written and read
        self.exchanges.append(exchange)

    def blob(self, content: bytes) -> str:
        digest = blake3(content).hexdigest()
        self.blobs[digest] = content
        return digest

    def read(self, number: int) -> Exchange:
        return self.exchanges[number - 1]

    def requests(self) -> list[Any]:
        """The requests as the record has them, decoded."""
        return rebuilt(self.exchanges, self.blobs)

    @property
    def last(self) -> Exchange:
        return self.exchanges[-1]

    @property
    def reply(self) -> Any:
        assert self.last.reply is not None
        return msgspec.json.decode(self.last.reply)


class Scene:
    """What a test needs of one open session."""

    def __init__(self, gateway: Gateway, session: Session, log: Log, http: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.session = session
        self.log = log
        self.http = http
        self.client = ChatClient(gateway.ask, gateway.url, gateway.url, session.key, MODEL)

    def post(self, request: Any, key: str | None = None, **options: Any) -> Any:
        body = msgspec.json.encode(request) if isinstance(request, dict) else request
        headers = {"Authorization": f"Bearer {key or self.session.key}", **options.pop("headers", {})}
        return self.http.post(f"{self.gateway.url}/chat/completions", data=body, headers=headers, **options)


def connect(socket: Path) -> aiohttp.ClientSession:
    """Connections to the gateway at `socket`; closed by whoever asked for it."""
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(socket), limit=0), cookie_jar=aiohttp.DummyCookieJar()
    )


@asynccontextmanager
async def scene(
    upstream: str | Mapping[str, ProviderAddress] | HttpUpstream,
    *,
    log: Log | None = None,
    retries: int = 4,
    stall: float = 30.0,
    breaker: CircuitBreaker | None = None,
    server: str = "same",
    notes: list[tuple[str, str]] | None = None,
    **options: Any,
) -> AsyncIterator[Scene]:
    """Open a gateway before `upstream`, a server of the dialect `server`; `notes`: of translated calls."""
    log = log or Log()

    def read_conversation(attempt: int, delta: RequestDelta) -> list[Any]:
        before = log.requests()[delta.parent - 1]["input"][: delta.keep] if delta.parent else []
        return [*before, *map(msgspec.json.decode, delta.append)]

    def note(kind: str, sentence: str) -> None:
        if notes is not None:
            notes.append((kind, sentence))

    def read_replies(attempt: int) -> Iterable[bytes]:
        return [bytes(exchange.original) for exchange in log.exchanges if exchange.original is not None]

    terms = TranslationTerms(read_conversation, read_replies, note)
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="hw"))
        if not isinstance(upstream, HttpUpstream):
            upstream = HttpUpstream(upstream, UPSTREAM_KEY, retries=retries, stall=stall, breaker=breaker)
        up = await stack.enter_async_context(upstream)
        model: Upstream = up
        if server == "auto":
            model = AdaptiveUpstream(up, terms)
        elif server != "same":
            model = TranslatedUpstream(up, DIALECTS[server], terms)
        gateway = await stack.enter_async_context(Gateway(model, Path(directory) / "s", **options))
        http = await stack.enter_async_context(connect(gateway.socket))
        session = await stack.enter_async_context(gateway.open_session(1, log))
        yield Scene(gateway, session, log, http)
    assert gateway.sessions == {}
    assert gateway.relay.admission.used == 0
    assert gateway.relay.retention.used == 0


def ask(*texts: str, **options: Any) -> dict[str, Any]:
    """A request whose messages say `texts`, the user and the assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"model": MODEL, "messages": messages, **options}
