"""Checks the base URL of a model server. The URL is stored in files, so it must not contain a secret."""

from __future__ import annotations

from urllib.parse import urlsplit


def find_url_problem(url: str) -> str:
    """Return the problem with a base URL, without quoting the URL; empty: there is none."""
    try:
        found = urlsplit(url)
        usable = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        usable = False
    if not usable or not url.isprintable() or " " in url:
        return "must be an `http` or `https` URL"
    if "@" in found.netloc:
        return "must not contain credentials: they would be stored in the run's files"
    if "?" in url or "#" in url:
        return "must not contain `?` or `#`: request paths are appended to it"
    return ""
