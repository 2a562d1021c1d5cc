"""Authorize requests to a registry: with nothing, a password, or a token for the request's scopes.

A token is fetched once for all waiting requests, and again when it is refused or about to expire. Logins come
from `credentials.py`; `host.py` sends the requests.
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

from .blob_stream import read_body
from .credentials import RegistryCredentials, RegistryLogin
from .reference import is_loopback
from .refusal import parse_refusal, unreached_error

Scopes = frozenset[str]  # `repository:library/debian:pull`

MOST_TOKENS = 256
LARGEST_TOKEN = 1024 * 1024  # bytes of a token server's response
_LIFETIME = 60.0  # seconds, if the server does not send it
_EARLY = 30.0  # seconds before its expiry at which a token is replaced, at most a quarter of its lifetime
_SHORTEST_SECRET = 4  # characters: a shorter secret may occur in a text by chance

_SCHEME = re.compile(r"(?:^|,)\s*(basic|bearer)(?:\s+|$)", re.IGNORECASE)
_PARAMETER = re.compile(r'(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')


class AuthChallenge(NamedTuple):
    """The authentication that a registry requires."""

    bearer: bool
    realm: str = ""
    service: str = ""
    scopes: Scopes = frozenset()


class TokenEntry:
    """A token and the lock under which it is fetched. Its repr does not show the token."""

    __slots__ = ("ends", "extra", "lock", "token")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.token = ""
        self.ends = 0.0
        self.extra: Scopes = frozenset()  # scopes that the registry requires beyond the request's own


class RegistryAuth:
    """Authenticates requests to one registry."""

    def __init__(
        self, registry: str, base: URL, credentials: RegistryCredentials, session: aiohttp.ClientSession
    ) -> None:
        self._registry = registry
        self._base = base
        self._credentials = credentials
        self._session = session
        self._challenge: AuthChallenge | None = None
        self._entries: OrderedDict[Scopes, TokenEntry] = OrderedDict()  # bound: MOST_TOKENS, the last used
        self._clock = asyncio.get_running_loop().time

    async def header(self, scopes: Scopes) -> str | None:
        """Return the value of `Authorization`; None until a challenge is known, or without a login."""
        if self._challenge is None:
            return None
        if not self._challenge.bearer:
            login = await self._credentials.find_login(self._registry)
            return login.basic if login is not None else None
        entry = self._entry(scopes)
        async with entry.lock:
            if not entry.token or self._clock() >= entry.ends:
                entry.token, lifetime = await self._fetch_token(self._challenge, scopes | entry.extra)
                entry.ends = self._clock() + lifetime - min(_EARLY, lifetime / 4)
            return f"Bearer {entry.token}"

    async def accept_challenge(self, scopes: Scopes, sent: str | None, headers: Iterable[str]) -> bool:
        """Process the challenge of a 401 response to the header `sent`; return whether to retry."""
        challenge = parse_challenge(headers)
        if challenge is None:
            return False
        self._challenge = challenge
        if not challenge.bearer:
            return sent is None and await self._credentials.find_login(self._registry) is not None
        entry = self._entry(scopes)
        ours = {scope.rpartition(":")[0] for scope in scopes}
        entry.extra = frozenset(scope for scope in challenge.scopes if scope.rpartition(":")[0] not in ours)
        if sent == f"Bearer {entry.token}":  # otherwise another request has replaced it
            entry.token = ""
        return True

    async def scrub_secrets(self, text: str) -> str:
        """Return `text` without any secret that was sent."""
        login = await self._credentials.find_login(self._registry) if self._challenge is not None else None
        secrets = list(login.secrets) if login is not None else []
        secrets += [entry.token for entry in self._entries.values()]
        for secret in secrets:
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, "[secret]")
        return text

    def _entry(self, scopes: Scopes) -> TokenEntry:
        entry = self._entries.get(scopes)
        if entry is None:
            entry = self._entries[scopes] = TokenEntry()
            if len(self._entries) > MOST_TOKENS:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(scopes)
        return entry

    async def _fetch_token(self, challenge: AuthChallenge, scopes: Scopes) -> tuple[str, float]:
        """Fetch a token; return it with its lifetime in seconds."""
        realm = URL(challenge.realm)
        what = f"a token for `{self._registry}` cannot be fetched from `{realm.host}`"
        if not self._is_trusted(realm):
            raise unreached_error(what, "its address is not an HTTPS URL", again=False)
        login = await self._credentials.find_login(self._registry)
        failure, answer = None, b""
        try:
            async with self._request_token(realm, challenge, sorted(scopes), login) as response:
                answer = await read_body(response, LARGEST_TOKEN)
                if response.status != 200:
                    failure = parse_refusal(what, response.status, response.headers, b"")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            failure = unreached_error(what, type(error).__name__)
        if failure is None and (token := _parse_token(answer)) is not None:
            return token
        raise failure or unreached_error(what, "its response contains no token")

    def _request_token(
        self, realm: URL, challenge: AuthChallenge, scopes: list[str], login: RegistryLogin | None
    ) -> aiohttp.client._RequestContextManager:
        if login is not None and login.identity:
            form = {"grant_type": "refresh_token", "service": challenge.service, "client_id": "holdwater"}
            form |= {"scope": " ".join(scopes), "refresh_token": login.identity}
            return self._session.post(realm, data=form, allow_redirects=False)
        query = [("service", challenge.service)] if challenge.service else []
        query += [("scope", scope) for scope in scopes]
        headers = {"Authorization": login.basic} if login is not None else {}
        return self._session.get(realm.extend_query(query), headers=headers, allow_redirects=False)

    def _is_trusted(self, realm: URL) -> bool:
        """Return whether a password may go there: by HTTPS, on loopback, or if the registry uses HTTP too."""
        if realm.scheme == "http":
            return self._base.scheme == "http" or is_loopback(realm.host or "")
        return realm.scheme == "https"


def parse_challenge(headers: Iterable[str]) -> AuthChallenge | None:
    """Return the authentication that `WWW-Authenticate` requires; a token is preferred to a password."""
    found: list[AuthChallenge] = []
    for header in headers:
        parts = _SCHEME.split(header)
        for scheme, rest in zip(parts[1::2], parts[2::2], strict=True):
            given = {name.lower(): quoted or plain for name, quoted, plain in _PARAMETER.findall(rest)}
            if scheme.lower() == "basic":
                found.append(AuthChallenge(bearer=False))
            elif given.get("realm"):
                scopes = frozenset(given.get("scope", "").split())
                found.append(AuthChallenge(True, given["realm"], given.get("service", ""), scopes))
    return max(found, key=lambda challenge: challenge.bearer, default=None)


def _parse_token(answer: bytes) -> tuple[str, float] | None:
    try:
        given = msgspec.json.decode(answer)
        token = given.get("token") or given.get("access_token")
        lifetime = float(given.get("expires_in") or _LIFETIME)
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, TypeError, ValueError, RecursionError):
        return None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        return None
    return token, lifetime if lifetime > 0.0 else _LIFETIME
