"""Takes the keys of an upstream out of its answers: as they are, escaped as in JSON, and split between reads.

A key that is spread over several events of a stream is not found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SHORTEST_SECRET = 8  # characters: a shorter key protects nothing, and stands in texts by chance
PUT_INSTEAD = b"[key]"
WIDEST = 13  # bytes of a character that is escaped, up to four times

_ENDING = b"\\u/0123456789abcdefABCDEF"  # bytes that an escape ends with, also one that is not whole
_ESCAPED = re.compile(rb"\\u00[2-7]")
_BEGUN = re.compile(rb"\\{1,8}(?:u(?:0(?:0[0-9a-fA-F]?)?)?)?\Z")
_CHARACTER = re.compile(rb"\\{1,8}u00([0-9a-fA-F]{2})|\\{1,8}(/)|([\s\S])")


class SecretScrubber:
    """Knows the keys that are not to be passed on."""

    def __init__(self, secrets: Iterable[str]) -> None:
        known = {secret.encode() for secret in secrets if len(secret) >= SHORTEST_SECRET}
        self._secrets = sorted(known, key=len, reverse=True)
        self._longest = max(map(len, self._secrets), default=0)
        codes = frozenset(b"".join(self._secrets))
        self._last = codes | frozenset(_ENDING)  # bytes that a begun key ends with
        self._has_slash = ord("/") in codes
        self._written = re.compile(b"|".join(map(_any_form, self._secrets)))

    def scrub(self, text: bytes) -> bytes:
        """`text` without any key that stands in it whole."""
        for secret in self._secrets:
            if secret in text:
                return self._written.sub(PUT_INSTEAD, text)
        return self._written.sub(PUT_INSTEAD, text) if self._may_escape(text) else text

    def _may_escape(self, text: bytes) -> bool:
        """Whether a character of a key may be escaped in `text`."""
        if not self._secrets:
            return False
        return _ESCAPED.search(text) is not None or (self._has_slash and b"\\/" in text)

    def scrub_text(self, text: str) -> str:
        return self.scrub(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    def count_begun(self, text: bytes) -> int:
        """How many bytes at the end of `text` may be the beginning of a key."""
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
        """The same where characters may be escaped; from `end` on there is the beginning of an escape."""
        found = list(_CHARACTER.finditer(tail, 0, end))
        text = b"".join([bytes.fromhex(one[1].decode()) if one[1] else one[2] or one[3] for one in found])
        held = self._count_plain(text)
        return len(tail) - (found[-held].start() if held else end)


class ScrubbedStream:
    """Bytes that come in pieces; the beginning of a key is held until its next piece is there."""

    def __init__(self, scrubber: SecretScrubber) -> None:
        self._scrubber = scrubber
        self._held = b""  # bound: the longest key, escaped

    def feed(self, piece: bytes) -> bytes:
        """As much of what came as can be passed on."""
        text = self._scrubber.scrub(self._held + piece if self._held else piece)
        cut = len(text) - self._scrubber.count_begun(text)
        self._held = text[cut:]
        return text[:cut] if self._held else text

    def rest(self) -> bytes:
        """The held bytes, when nothing follows them."""
        held, self._held = self._held, b""
        return held


def _any_form(secret: bytes) -> bytes:
    """A pattern for a key of which any character may be escaped, once or more often."""
    return b"".join(map(_any_form_of, secret))


def _any_form_of(code: int) -> bytes:
    digits = b"".join([b"[%s%s]" % (digit.encode(), digit.upper().encode()) for digit in f"{code:02x}"])
    slash = b"|/" if code == ord("/") else b""
    return rb"(?:%s|\\{1,8}(?:u00%s%s))" % (re.escape(bytes([code])), digits, slash)
