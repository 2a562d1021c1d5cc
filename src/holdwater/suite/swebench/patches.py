"""Lists the files of a patch, or wraps it in a shell command. `repository.py` applies patches."""

from __future__ import annotations

import re
from hashlib import sha256

HEADER = re.compile(r'(?:---|\+\+\+|rename from|rename to|copy to) ("?)(?:[ab]/)?(.+?)\1(?:\t.*)?')
ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b'"': b'"', b"\\": b"\\"}


def files_of(patch: str) -> list[str]:
    """Return the files that a git patch touches, in order and without duplicates."""
    found: dict[str, None] = {}
    heading = False
    for line in patch.splitlines():
        if line.startswith("diff --git "):
            heading = True
            for name in _common_name(line):
                found[name] = None
        elif line.startswith("@@ ") or line.startswith("GIT binary patch"):
            heading = False
        elif heading and (match := HEADER.fullmatch(line)) and match[2] != "/dev/null":
            found[_unquote_name(match[2]) if match[1] else match[2]] = None
    return list(found)


def as_command(patch: str) -> str:
    """Return a shell command that applies the patch in the working directory."""
    word = "EOF_" + sha256(patch.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    end = "" if patch.endswith("\n") else "\n"  # a binary patch ends with an empty line that must stay
    return f"git apply --whitespace=nowarn - <<'{word}'\n{patch}{end}{word}\n"


def _common_name(line: str) -> list[str]:
    """Return the name in `diff --git a/NAME b/NAME` if it is unquoted and the same on both sides."""
    names = line.removeprefix("diff --git ")
    half = len(names) // 2
    left, right = names[:half], names[half + 1 :]
    return [left[2:]] if left[:2] == "a/" and right == f"b/{left[2:]}" else []


def _unquote_name(quoted: str) -> str:
    """Decode a name that git quoted in C style."""

    def decode_escape(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else ESCAPES.get(code, code)

    return ESCAPE.sub(decode_escape, quoted.encode()).decode("utf-8", "surrogateescape")
