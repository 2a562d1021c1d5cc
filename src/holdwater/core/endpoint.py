"""What the base URL of a model's server may look like: it is kept in files, so that it holds no secret."""

from __future__ import annotations

from urllib.parse import urlsplit


def find_url_problem(url: str) -> str:
    """What is wrong with a base URL, without a word of the URL itself; empty: nothing."""
    try:
        found = urlsplit(url)
        usable = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        usable = False
    if not usable or not url.isprintable() or " " in url:
        return "must be a URL of `http` or `https`"
    if "@" in found.netloc:
        return "must hold no credentials: they would be kept in the run's files"
    if "?" in url or "#" in url:
        return "must have neither `?` nor `#`: the path of each request is put behind it"
    return ""
