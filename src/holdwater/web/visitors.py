"""Which HTTP requests a server of ours obeys: one set of rules for the door and for every page that we serve.

A web page can make a browser send requests to any address that this machine reaches. The page cannot choose
`Host`, `Origin` and `Sec-Fetch-Site`, it cannot send JSON to another site without asking first, and it does
not know the token. All four are checked, so that one that fails is not the last.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection
from typing import NamedTuple

from multidict import CIMultiDictProxy

from ..core.errors import Refused

LOCALHOST = "localhost"
OWN_SITE = ("same-origin", "none")  # of `Sec-Fetch-Site`; none: the user typed the address
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")

Headers = CIMultiDictProxy[str]


class VisitorRules(NamedTuple):
    """What a request needs to be obeyed."""

    names: frozenset[str]  # of the server, in lower case and without ports; `localhost` is always one
    local: bool  # this machine alone reaches the server: addresses that are not loopback name another one
    keys: tuple[str, ...] = ()  # none: no key is wanted

    def admit(self, headers: Headers) -> str | None:
        """The key that the request came with, None where none is wanted; raises `Refused`."""
        self._check_host(headers)
        _check_site(headers)
        return self._check_key(headers)

    def _check_host(self, headers: Headers) -> None:
        """A page whose own name was bound to our address (DNS rebinding) still sends its own name."""
        hosts = headers.getall("Host", [])
        found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if found is None or not self._is_ours(found[1].lower()):
            told = ", ".join(hosts)[:200]
            raise Refused(
                "misdirected",
                f"`Host` does not name this server: `{told}`",
                "use the address that the server names at its start; `--allow-host NAME` adds a name",
            )

    def _is_ours(self, host: str) -> bool:
        if host == LOCALHOST or host in self.names:
            return True
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return address.is_loopback or not self.local  # an address cannot be bound to another one, a name can

    def _check_key(self, headers: Headers) -> str | None:
        if not self.keys:
            return None
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        sent = bearer.strip() if scheme.lower() == "bearer" else headers.get("X-Api-Key", "")
        given = sent.encode("utf-8", "surrogateescape")
        fitting = [key for key in self.keys if hmac.compare_digest(given, key.encode())]  # all are compared
        if not fitting:
            raise Refused(
                "unauthorized",
                "this key does not open this server" if sent else "a key is needed",
                "send `Authorization: Bearer KEY`; at its start a server names the file with its token",
            )
        return fitting[0]


def check_content(headers: Headers, kinds: Collection[str]) -> None:
    """Refuse a body of another type: browsers send forms and plain text without asking first."""
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind not in kinds:
        known = " or ".join(f"`{kind}`" for kind in kinds)
        raise Refused("content_type", f"invalid `Content-Type` of a body: `{kind[:80]}`", f"use {known}")


def _check_site(headers: Headers) -> None:
    """Refuse requests that a page of another site makes. `Host` has been checked: `Origin` must equal it."""
    host = headers["Host"].lower()
    origins = [origin.lower() for origin in headers.getall("Origin", [])]
    sites = [site.strip().lower() for site in headers.getall("Sec-Fetch-Site", [])]
    if any(origin.partition("://")[2] != host for origin in origins) or not set(sites) <= set(OWN_SITE):
        told = ", ".join(origins or sites)[:200]
        raise Refused("foreign", f"the request comes from a page of another site: `{told}`")
