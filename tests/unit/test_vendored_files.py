"""The browser view's libraries are the files of their packages, and stay small."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import holdwater.viewer
from holdwater.viewer.static import STATIC

PLACE = Path(holdwater.viewer.__file__).parent / "static"
MOST_BYTES = 120 * 1024  # of all files that a page loads


def test_libraries_have_the_hashes_that_are_written_beside_them() -> None:
    files = tomllib.loads((PLACE / "vendored.toml").read_text())["file"]

    assert {file["name"] for file in files} == {"htmx.min.js", "uplot.min.js", "uplot.min.css"}
    for file in files:
        assert hashlib.sha256((PLACE / file["name"]).read_bytes()).hexdigest() == file["sha256"], file


def test_a_page_loads_little() -> None:
    assert sum(path.stat().st_size for path in STATIC.values()) < MOST_BYTES
