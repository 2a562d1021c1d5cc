"""Remove or normalize the traces of this machine and of the time that installers leave in a tree.

All functions block.
"""

from __future__ import annotations

import base64
import csv
import io
import re
from hashlib import file_digest
from pathlib import Path

from .thread import CancelCheck

INSTALL_TRACES = ("direct_url.json", "uv_cache.json", "uv_build.json")  # where a package came from, and when
# A script's first line; or, for an interpreter with a long path, the three lines that start it by a shell.
SHEBANG = re.compile(rb"\A#!(/bin/sh\n'''exec' [^\n]*\n' '''|[^\n]*python[^\n]*)\n")


def clean_tree(tree: Path, library: Path, prefix: str, check: CancelCheck) -> None:
    """Remove install traces, rewrite shebangs and normalize modes, after packages were installed."""
    (tree / ".lock").unlink(missing_ok=True)  # from uv
    for information in library.glob("site-packages/*.dist-info"):
        for name in INSTALL_TRACES:
            (information / name).unlink(missing_ok=True)
    for script in (tree / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            _rewrite_shebang(script, prefix)
    normalize_modes(tree, check)


def normalize_modes(tree: Path, check: CancelCheck) -> None:
    """Make all files readable for all users and writable for the owner, independent of the umask."""
    for path in tree.rglob("*"):
        check()
        if not path.is_symlink():
            executable = path.is_dir() or path.stat().st_mode & 0o111
            path.chmod(0o755 if executable else 0o644)
    tree.chmod(0o755)


def write_records(library: Path, check: CancelCheck) -> None:
    """Rewrite each package's `RECORD` to match its files as they are now."""
    for record in library.glob("site-packages/*.dist-info/RECORD"):
        check()
        with record.open(newline="") as file:
            names = sorted(row[0] for row in csv.reader(file) if row)
        written = io.StringIO(newline="")
        csv.writer(written, lineterminator="\n").writerows(
            _record_row(library / "site-packages", name)
            for name in names
            if (library / "site-packages" / name).exists()
        )
        record.write_text(written.getvalue())


def _rewrite_shebang(script: Path, prefix: str) -> None:
    with script.open("rb") as file:
        if file.read(2) != b"#!":
            return
    content = script.read_bytes()
    script.write_bytes(SHEBANG.sub(f"#!{prefix}/bin/python\n".encode(), content, count=1))


def _record_row(site: Path, name: str) -> tuple[str, str, str]:
    path = site / name
    if path.name == "RECORD" or not path.is_file():
        return name, "", ""
    with path.open("rb") as file:
        digest = base64.urlsafe_b64encode(file_digest(file, "sha256").digest()).rstrip(b"=").decode()
    return name, f"sha256={digest}", str(path.stat().st_size)
