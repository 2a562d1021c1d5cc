"""The files that every page loads: two libraries (versions in `vendored.toml`), a style and a script."""

from __future__ import annotations

from pathlib import Path

NAMES = (
    "htmx.min.js",
    "uplot.min.js",
    "uplot.min.css",
    "view.css",
    "view.js",
    "work.js",
    "rollouts.js",
    "icon.svg",
)
STATIC = {name: Path(__file__).parent / name for name in NAMES}
STATIC["favicon.ico"] = STATIC["icon.svg"]  # browsers ask for it where a page names none, as beside raw JSON
