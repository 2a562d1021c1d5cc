"""Whom a request is signed for, decided without sending one."""

from __future__ import annotations

import aiohttp
import pytest
from yarl import URL

from holdwater.core.image import RegistryOptions
from holdwater.image.registry.credentials import RegistryCredentials
from holdwater.image.registry.host import RegistryHost, RegistryRetryPolicy


@pytest.mark.parametrize(
    ("registry", "insecure", "base", "location", "leads", "own"),
    [
        ("ghcr.io", False, "https://ghcr.io/v2/a", "/v2/b?x=1", "https://ghcr.io/v2/b?x=1", True),
        ("ghcr.io", False, "https://ghcr.io/v2/a", "http://ghcr.io/v2/b", "https://ghcr.io/v2/b", True),
        (
            "ghcr.io",
            False,
            "https://ghcr.io/v2/a",
            "https://GHCR.io:443/v2/b",
            "https://GHCR.io/v2/b",
            True,
        ),
        ("ghcr.io", False, "https://ghcr.io/v2/a", "https://ghcr.io:444/b", "https://ghcr.io:444/b", False),
        ("ghcr.io", False, "https://ghcr.io/v2/a", "https://cdn.ghcr.io/b", "https://cdn.ghcr.io/b", False),
        ("ghcr.io", False, "https://cdn.io/v2/a", "/b", "https://cdn.io/b", False),
        ("ghcr.io:443", False, "https://ghcr.io/v2/a", "/b", "https://ghcr.io/b", True),
        ("r.io:8443", False, "https://r.io:8443/v2/a", "http://r.io/b", "https://r.io:8443/b", True),
        (
            "docker.io",
            False,
            "https://registry-1.docker.io/v2/a",
            "/b",
            "https://registry-1.docker.io/b",
            True,
        ),
        ("docker.io", False, "https://docker.io/a", "/b", "https://docker.io/b", False),
        ("r.io", True, "http://r.io/v2/a", "/b", "http://r.io/b", True),
        ("r.io", True, "http://r.io/v2/a", "https://r.io/b", "https://r.io/b", False),
        ("localhost:5000", False, "http://localhost:5000/v2/a", "/b", "http://localhost:5000/b", True),
    ],
)
async def test_a_location_is_signed_only_for_its_own_registry_and_never_unencrypted(
    registry: str, insecure: bool, base: str, location: str, leads: str, own: bool
) -> None:
    async with aiohttp.ClientSession() as session:
        settings = RegistryOptions(insecure=insecure)
        host = RegistryHost(
            registry,
            settings,
            session,
            RegistryCredentials(None),
            lambda kind, message: None,
            RegistryRetryPolicy(),
        )
        found = host.resolve_location(location, URL(base))
        assert str(found) == leads
        assert host._is_own(found) is own
