"""What installers leave in a tree that tells of this machine or of the time: taken out, or made the same.

Blocks.
"""

from __future__ import annotations

import base64
import csv
import io
import re
from hashlib import file_digest
from pathlib import Path

from .thread import Check

TRACES = ("direct_url.json", "uv_cache.json", "uv_build.json")  # where a package came from, and when
# A script's first line; or, for interpreters with a long path, the three that make a shell start it.
SHEBANG = re.compile(rb"\A#!(/bin/sh\n'''exec' [^\n]*\n' '''|[^\n]*python[^\n]*)\n")


def tidy(tree: Path, library: Path, prefix: str, check: Check) -> None:
    """After packages were installed."""
    (tree / ".lock").unlink(missing_ok=True)  # uv's
    for information in library.glob("site-packages/*.dist-info"):
        for name in TRACES:
            (information / name).unlink(missing_ok=True)
    for script in (tree / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            _point(script, prefix)
    level(tree, check)


def level(tree: Path, check: Check) -> None:
    """Everybody may read everything, whatever mask it was made with; its owner may change it."""
    for path in tree.rglob("*"):
        check()
        if not path.is_symlink():
            executable = path.is_dir() or path.stat().st_mode & 0o111
            path.chmod(0o755 if executable else 0o644)
    tree.chmod(0o755)


def write_records(library: Path, check: Check) -> None:
    """What each package's `RECORD` says of its files, as they are now."""
    for record in library.glob("site-packages/*.dist-info/RECORD"):
        check()
        with record.open(newline="") as file:
            names = sorted(row[0] for row in csv.reader(file) if row)
        written = io.StringIO(newline="")
        csv.writer(written, lineterminator="\n").writerows(
            _row(library / "site-packages", name)
            for name in names
            if (library / "site-packages" / name).exists()
        )
        record.write_text(written.getvalue())


def _point(script: Path, prefix: str) -> None:
    with script.open("rb") as file:
        if file.read(2) != b"#!":
            return
    content = script.read_bytes()
    script.write_bytes(SHEBANG.sub(f"#!{prefix}/bin/python\n".encode(), content, count=1))


def _row(site: Path, name: str) -> tuple[str, str, str]:
    path = site / name
    if path.name == "RECORD" or not path.is_file():
        return name, "", ""
    with path.open("rb") as file:
        digest = base64.urlsafe_b64encode(file_digest(file, "sha256").digest()).rstrip(b"=").decode()
    return name, f"sha256={digest}", str(path.stat().st_size)
