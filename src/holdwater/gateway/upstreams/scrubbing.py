"""Removes an upstream's keys from its answers: plain, escaped as in JSON, or split between reads.

A key that is spread over several events of a stream is not found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SHORTEST_SECRET = 8  # characters: a shorter key protects nothing, and occurs in texts by chance
REPLACEMENT = b"[key]"
WIDEST = 13  # bytes of a character that is escaped up to four times

_ENDING = b"\\u/0123456789abcdefABCDEF"  # bytes that a complete or incomplete escape ends with
_ESCAPED = re.compile(rb"\\u00[2-7]")
_BEGUN = re.compile(rb"\\{1,8}(?:u(?:0(?:0[0-9a-fA-F]?)?)?)?\Z")
_CHARACTER = re.compile(rb"\\{1,8}u00([0-9a-fA-F]{2})|\\{1,8}(/)|([\s\S])")


class SecretScrubber:
    """Replaces known keys in texts."""

    def __init__(self, secrets: Iterable[str]) -> None:
        known = {secret.encode() for secret in secrets if len(secret) >= SHORTEST_SECRET}
        self._secrets = sorted(known, key=len, reverse=True)
        self._longest = max(map(len, self._secrets), default=0)
        codes = frozenset(b"".join(self._secrets))
        self._last = codes | frozenset(_ENDING)  # bytes that an incomplete key ends with
        self._has_slash = ord("/") in codes
        self._pattern = re.compile(
            b"|".join([b"".join(map(_escape_byte, secret)) for secret in self._secrets])
        )

    def scrub(self, text: bytes) -> bytes:
        """Return `text` with each complete key replaced."""
        for secret in self._secrets:
            if secret in text:
                return self._pattern.sub(REPLACEMENT, text)
        return self._pattern.sub(REPLACEMENT, text) if self._may_escape(text) else text

    def _may_escape(self, text: bytes) -> bool:
        """Whether `text` may contain an escaped character of a key."""
        if not self._secrets:
            return False
        return _ESCAPED.search(text) is not None or (self._has_slash and b"\\/" in text)

    def scrub_text(self, text: str) -> str:
        return self.scrub(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    def count_begun(self, text: bytes) -> int:
        """Return the number of bytes at the end of `text` that may be the start of a key."""
        if not text or text[-1] not in self._last or not self._secrets:
            return 0
        tail = text[-WIDEST * self._longest :]
        begun = _BEGUN.search(tail)
        if begun is None and not self._may_escape(tail):
            return self._count_plain(tail)
        return self._count_escaped(tail, begun.start() if begun is not None else len(tail))

    def _count_plain(self, tail: bytes) -> int:
        longest = 0
        for secret in self._secrets:
            at = max(0, len(tail) - len(secret) + 1)
            while (at := tail.find(secret[:1], at)) >= 0:
                if secret.startswith(tail[at:]):
                    longest = max(longest, len(tail) - at)
                    break
                at += 1
        return longest

    def _count_escaped(self, tail: bytes, end: int) -> int:
        """Do the same for escaped characters; an incomplete escape starts at `end`."""
        found = list(_CHARACTER.finditer(tail, 0, end))
        text = b"".join([bytes.fromhex(one[1].decode()) if one[1] else one[2] or one[3] for one in found])
        held = self._count_plain(text)
        return len(tail) - (found[-held].start() if held else end)


class ScrubbedStream:
    """Scrubs bytes that arrive in pieces; holds the start of a key until the next piece arrives."""

    def __init__(self, scrubber: SecretScrubber) -> None:
        self._scrubber = scrubber
        self._held = b""  # bound: the longest key, escaped

    def feed(self, piece: bytes) -> bytes:
        """Add a piece; return the bytes that can be passed on."""
        text = self._scrubber.scrub(self._held + piece if self._held else piece)
        cut = len(text) - self._scrubber.count_begun(text)
        self._held = text[cut:]
        return text[:cut] if self._held else text

    def flush(self) -> bytes:
        """Return the held bytes, after the last piece."""
        held, self._held = self._held, b""
        return held


def _escape_byte(code: int) -> bytes:
    """Return a pattern for a character of a key that may be escaped, once or several times."""
    digits = b"".join([b"[%s%s]" % (digit.encode(), digit.upper().encode()) for digit in f"{code:02x}"])
    slash = b"|/" if code == ord("/") else b""
    return rb"(?:%s|\\{1,8}(?:u00%s%s))" % (re.escape(bytes([code])), digits, slash)
