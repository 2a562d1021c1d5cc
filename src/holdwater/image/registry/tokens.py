"""What a request to a registry is signed with: nothing, a password, or a token for its scopes.

A token is fetched once for all who wait for it, again when it is refused or about to expire. Where logins
come from is in `credentials.py`; who sends the requests in `host.py`.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import aiohttp
import msgspec
from yarl import URL

from .credentials import Credentials, Login
from .flow import whole
from .reference import is_loopback
from .refusal import refusal, unreached

Scopes = frozenset[str]  # `repository:library/debian:pull`

MOST_TOKENS = 256
LARGEST_TOKEN = 1024 * 1024  # bytes of a token server's answer
_LIFETIME = 60.0  # seconds, where the server does not say
_EARLY = 30.0  # seconds before its end at which a token is replaced, at most a quarter of its life
_SHORTEST_SECRET = 4  # characters: a shorter one stands in texts by chance

_SCHEME = re.compile(r"(?:^|,)\s*(basic|bearer)(?:\s+|$)", re.IGNORECASE)
_PARAMETER = re.compile(r'(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')


class Challenge(NamedTuple):
    """How a registry wants to be asked."""

    bearer: bool
    realm: str = ""
    service: str = ""
    scopes: Scopes = frozenset()


class Entry:
    """A token and the lock under which it is fetched. It does not print the token."""

    __slots__ = ("ends", "extra", "lock", "token")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.token = ""
        self.ends = 0.0
        self.extra: Scopes = frozenset()  # what the registry asked for beyond our own scopes


class Authority:
    """How one registry is signed in to."""

    def __init__(
        self, registry: str, base: URL, credentials: Credentials, session: aiohttp.ClientSession
    ) -> None:
        self._registry = registry
        self._base = base
        self._credentials = credentials
        self._session = session
        self._challenge: Challenge | None = None
        self._entries: OrderedDict[Scopes, Entry] = OrderedDict()  # bound: MOST_TOKENS, the latest used
        self._clock = asyncio.get_running_loop().time

    async def header(self, scopes: Scopes) -> str | None:
        """The value of `Authorization`, as far as is known what the registry wants."""
        if self._challenge is None:
            return None
        if not self._challenge.bearer:
            login = await self._credentials.login(self._registry)
            return login.basic if login is not None else None
        entry = self._entry(scopes)
        async with entry.lock:
            if not entry.token or self._clock() >= entry.ends:
                entry.token, lifetime = await self._fetched(self._challenge, scopes | entry.extra)
                entry.ends = self._clock() + lifetime - min(_EARLY, lifetime / 4)
            return f"Bearer {entry.token}"

    async def refused(self, scopes: Scopes, sent: str | None, headers: Iterable[str]) -> bool:
        """The registry answered 401 to what was `sent`: whether there is something else to send."""
        challenge = challenge_of(headers)
        if challenge is None:
            return False
        self._challenge = challenge
        if not challenge.bearer:
            return sent is None and await self._credentials.login(self._registry) is not None
        entry = self._entry(scopes)
        ours = {scope.rpartition(":")[0] for scope in scopes}
        entry.extra = frozenset(scope for scope in challenge.scopes if scope.rpartition(":")[0] not in ours)
        if sent == f"Bearer {entry.token}":  # otherwise someone else has replaced it by now
            entry.token = ""
        return True

    async def scrubbed(self, text: str) -> str:
        """`text` without any secret that was sent."""
        login = await self._credentials.login(self._registry) if self._challenge is not None else None
        secrets = list(login.secrets) if login is not None else []
        secrets += [entry.token for entry in self._entries.values()]
        for secret in secrets:
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, "[secret]")
        return text

    def _entry(self, scopes: Scopes) -> Entry:
        entry = self._entries.get(scopes)
        if entry is None:
            entry = self._entries[scopes] = Entry()
            if len(self._entries) > MOST_TOKENS:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(scopes)
        return entry

    async def _fetched(self, challenge: Challenge, scopes: Scopes) -> tuple[str, float]:
        """A token, and the seconds that it lasts."""
        realm = URL(challenge.realm)
        what = f"a token for `{self._registry}` cannot be had from `{realm.host}`"
        if not self._trusted(realm):
            raise unreached(what, "its address is not an HTTPS URL", again=False)
        login = await self._credentials.login(self._registry)
        failure, answer = None, b""
        try:
            async with self._asked(realm, challenge, sorted(scopes), login) as response:
                answer = await whole(response, LARGEST_TOKEN)
                if response.status != 200:
                    failure = refusal(what, response.status, response.headers, b"")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            failure = unreached(what, type(error).__name__)
        if failure is None and (token := _token(answer)) is not None:
            return token
        raise failure or unreached(what, "its answer holds no token")

    def _asked(
        self, realm: URL, challenge: Challenge, scopes: list[str], login: Login | None
    ) -> aiohttp.client._RequestContextManager:
        if login is not None and login.identity:
            form = {"grant_type": "refresh_token", "service": challenge.service, "client_id": "holdwater"}
            form |= {"scope": " ".join(scopes), "refresh_token": login.identity}
            return self._session.post(realm, data=form, allow_redirects=False)
        query = [("service", challenge.service)] if challenge.service else []
        query += [("scope", scope) for scope in scopes]
        headers = {"Authorization": login.basic} if login is not None else {}
        return self._session.get(realm.extend_query(query), headers=headers, allow_redirects=False)

    def _trusted(self, realm: URL) -> bool:
        """Whether a password may be sent there: in the clear only where the registry itself is asked so."""
        if realm.scheme == "http":
            return self._base.scheme == "http" or is_loopback(realm.host or "")
        return realm.scheme == "https"


def challenge_of(headers: Iterable[str]) -> Challenge | None:
    """What `WWW-Authenticate` asks for; a token rather than a password."""
    found: list[Challenge] = []
    for header in headers:
        parts = _SCHEME.split(header)
        for scheme, rest in zip(parts[1::2], parts[2::2], strict=True):
            given = {name.lower(): quoted or plain for name, quoted, plain in _PARAMETER.findall(rest)}
            if scheme.lower() == "basic":
                found.append(Challenge(bearer=False))
            elif given.get("realm"):
                scopes = frozenset(given.get("scope", "").split())
                found.append(Challenge(True, given["realm"], given.get("service", ""), scopes))
    return max(found, key=lambda challenge: challenge.bearer, default=None)


def _token(answer: bytes) -> tuple[str, float] | None:
    try:
        given = msgspec.json.decode(answer)
        token = given.get("token") or given.get("access_token")
        lifetime = float(given.get("expires_in") or _LIFETIME)
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, TypeError, ValueError, RecursionError):
        return None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        return None
    return token, lifetime if lifetime > 0.0 else _LIFETIME
