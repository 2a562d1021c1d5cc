"""Decides which HTTP requests our servers accept: one set of rules for the rollout server and for all pages.

A web page can make a browser send requests to any address that this machine reaches. The page cannot choose
`Host`, `Origin` and `Sec-Fetch-Site`, it cannot send JSON to another site without a preflight request, and
it does not know the token. All four are checked, so that no single check is the last line of defence.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection
from typing import NamedTuple

from multidict import CIMultiDictProxy

from ..core.errors import RequestRefused

LOCALHOST = "localhost"
OWN_SITE = ("same-origin", "none")  # values of `Sec-Fetch-Site`; none: the user typed the address
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")

Headers = CIMultiDictProxy[str]


class RequestRules(NamedTuple):
    """The conditions for accepting a request."""

    # Names of the server, in lower case and without ports; `localhost` is always accepted.
    names: frozenset[str]
    local: bool  # only this machine can reach the server, so a non-loopback address names another one
    keys: tuple[str, ...] = ()  # empty: no key is required

    def admit(self, headers: Headers) -> str | None:
        """Return the key of the request, or None if no key is required; raise `RequestRefused`."""
        self._check_host(headers)
        _check_site(headers)
        return self._check_key(headers)

    def _check_host(self, headers: Headers) -> None:
        """Refuse a foreign `Host`.

        A page that bound its own name to our address (DNS rebinding) still sends that name.
        """
        hosts = headers.getall("Host", [])
        found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if found is None or not self._is_ours(found[1].lower()):
            told = ", ".join(hosts)[:200]
            raise RequestRefused(
                "misdirected",
                f"`Host` does not name this server: `{told}`",
                "use the address that the server prints at start; `--allow-host NAME` adds a name",
            )

    def _is_ours(self, host: str) -> bool:
        if host == LOCALHOST or host in self.names:
            return True
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        # A name can be bound to our address, another address cannot.
        return address.is_loopback or not self.local

    def _check_key(self, headers: Headers) -> str | None:
        if not self.keys:
            return None
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        sent = bearer.strip() if scheme.lower() == "bearer" else headers.get("X-Api-Key", "")
        given = sent.encode("utf-8", "surrogateescape")
        fitting = [key for key in self.keys if hmac.compare_digest(given, key.encode())]  # compares all keys
        if not fitting:
            raise RequestRefused(
                "unauthorized",
                "invalid API key" if sent else "missing API key",
                "send `Authorization: Bearer KEY`; the server prints the path of its token file at start",
            )
        return fitting[0]


def check_content(headers: Headers, kinds: Collection[str]) -> None:
    """Refuse a body of another type: browsers send forms and plain text without a preflight request."""
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind not in kinds:
        known = " or ".join(f"`{kind}`" for kind in kinds)
        raise RequestRefused(
            "content_type", f"invalid `Content-Type` of a body: `{kind[:80]}`", f"use {known}"
        )


def _check_site(headers: Headers) -> None:
    """Refuse requests from pages of other sites. `Host` has been checked before: `Origin` must equal it."""
    host = headers["Host"].lower()
    origins = [origin.lower() for origin in headers.getall("Origin", [])]
    sites = [site.strip().lower() for site in headers.getall("Sec-Fetch-Site", [])]
    if any(origin.partition("://")[2] != host for origin in origins) or not set(sites) <= set(OWN_SITE):
        told = ", ".join(origins or sites)[:200]
        raise RequestRefused("foreign", f"the request comes from a page of another site: `{told}`")
