"""Patches as text: which files one touches, and one as a shell command. Applying them is in `work.py`."""

from __future__ import annotations

import re
from hashlib import sha256

HEADER = re.compile(r'(?:---|\+\+\+|rename from|rename to|copy to) ("?)(?:[ab]/)?(.+?)\1(?:\t.*)?')
ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b'"': b'"', b"\\": b"\\"}


def files_of(patch: str) -> list[str]:
    """The files that a patch of git's touches, each once, in their order."""
    found: dict[str, None] = {}
    heading = False
    for line in patch.splitlines():
        if line.startswith("diff --git "):
            heading = True
            for name in _both(line):
                found[name] = None
        elif line.startswith("@@ ") or line.startswith("GIT binary patch"):
            heading = False
        elif heading and (match := HEADER.fullmatch(line)) and match[2] != "/dev/null":
            found[_plain(match[2]) if match[1] else match[2]] = None
    return list(found)


def as_command(patch: str) -> str:
    """A shell command that applies it in the working directory."""
    word = "EOF_" + sha256(patch.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    end = "" if patch.endswith("\n") else "\n"  # a binary patch ends with an empty line, which has to stay
    return f"git apply --whitespace=nowarn - <<'{word}'\n{patch}{end}{word}\n"


def _both(line: str) -> list[str]:
    """The name in `diff --git a/NAME b/NAME`, where it is plain and the same on both sides."""
    names = line.removeprefix("diff --git ")
    half = len(names) // 2
    left, right = names[:half], names[half + 1 :]
    return [left[2:]] if left[:2] == "a/" and right == f"b/{left[2:]}" else []


def _plain(quoted: str) -> str:
    """A name as git quotes it in C's way."""

    def meant(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else ESCAPES.get(code, code)

    return ESCAPE.sub(meant, quoted.encode()).decode("utf-8", "surrogateescape")
