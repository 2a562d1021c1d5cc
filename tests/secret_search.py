"""Searches everything that a run has written, unpacked, and everything that is exported from it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from zstandard import ZstdDecompressor

import holdwater as hw
from holdwater.cli import main
from holdwater.ledger import segment


def contents(directory: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file's name and content, as it is and unpacked."""
    for path in sorted(directory.rglob("*")):
        yield path, os.fsencode(path.name)
        if not path.is_file():
            continue
        raw = path.read_bytes()
        yield path, raw
        if path.suffix == ".seg":
            yield from ((path, record) for record in segment.read_records(path))
        if raw[:4] == b"\x28\xb5\x2f\xfd":
            yield path, ZstdDecompressor().stream_reader(raw).read()


def found(word: str, directory: Path) -> list[Path]:
    return [path for path, content in contents(directory) if word.encode() in content]


def export_all(run: Path, into: Path, capfd: pytest.CaptureFixture[str]) -> None:
    into.mkdir()
    for what in ("outcomes", "attempts", "exchanges"):
        for format in ("jsonl", "csv")[: 1 if what == "exchanges" else 2]:
            with (into / f"{what}.{format}").open("wb") as out:
                hw.export(run, out, what=what, format=format)
    lines = io.BytesIO()
    hw.export(run, lines, format="openai-jsonl", everything=True)
    (into / "tuning.jsonl").write_bytes(lines.getvalue())
    hw.export(run, into / "atif", format="atif")
    for flags in ([], ["--json"], ["--raw", "--turn", "1"], ["--raw", "--turn", "2"]):
        assert main(["transcript", str(run), "one", *flags]) == 0
    assert main(["show", str(run), "one"]) == 0
    (into / "pages").write_text(capfd.readouterr().out)
