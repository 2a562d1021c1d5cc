"""Pages and transcripts as they look on a terminal: layout is kept, lines fit, a pager shows them."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from tests.terminal_screen import on_terminal
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.testing.scripted_model import ScriptedReply, serve_script

DETAIL = """\
=== test session starts ===
    def test_a():
        x = {
\t\t"deep": 1,
        }
>       assert x == 2

=== 1 failed ==="""
PROMPT = (
    "Look at this function, which has a bug that is hard to see at first, and mend it:\n\n"
    "    def area(width, height):\n"
    "        return width + height  # a comment that is far too long for any narrow terminal to hold\n"
    "漢字の文章はとても長くて端末の幅を超えることがありますので折り返しが必要です。"
)


def grade(instance: hw.Instance, sandbox: Any, answer: Any) -> hw.Grade:
    return hw.Grade(passed=False, score=0.0, detail=DETAIL)


async def act(instance: hw.Instance, sandbox: Any, model: Any) -> None:
    await sandbox.write("a.txt", b"x")
    await model.chat([{"role": "user", "content": PROMPT}])
    raise ValueError("wrong\n  layout:\n    deep \x1b[31mred\x1b[0m")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run whose failure and whose grade have several lines, and a conversation with long ones."""
    path = tmp_path_factory.mktemp("reading") / "run"

    async def conduct() -> None:
        async with serve_script(lambda request: ScriptedReply(text="Done.")) as url:
            suite = hw.Suite(name="s", instances=lambda: [hw.Instance(id="i0")], grade=grade)
            await hw.arun(suite, act, out=path, model="m", base_url=url, samples=2)

    asyncio.run(conduct())
    yield path


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_show_keeps_the_layout_of_failures_and_grades(run: Path, columns: int) -> None:
    screen = on_terminal("show", str(run), "i0", columns=columns)

    rows = [row.rstrip() for row in screen.rows]
    assert screen.status == 0
    first = rows.index("message   ValueError: wrong")
    assert rows[first + 1 : first + 3] == ["            layout:", "              deep red"]
    margin = " " * len("detail    ")
    place = rows.index("detail    === test session starts ===")
    expected = [margin + row.expandtabs(4) if row else "" for row in DETAIL.splitlines()[1:]]
    assert rows[place + 1 : place + 8] == expected


def test_show_names_the_first_of_several_samples(run: Path) -> None:
    rows = on_terminal("show", str(run), "i0", columns=100).rows

    titles = [row for row in rows if row.startswith("attempt ")]
    assert [title.split(":")[0] for title in titles] == ["attempt 1 of sample 0", "attempt 1 of sample 1"]
    assert sum("1 changed file," in row for row in rows) == 2


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_transcript_fits_its_terminal_and_keeps_indentation(run: Path, columns: int) -> None:
    screen = on_terminal("transcript", str(run), "i0", columns=columns)

    assert screen.status == 0
    assert max(cell_len(row) for row in screen.rows) <= columns
    assert screen.rows[0].startswith("i0  attempt 1 of sample 0: failed")
    start = next(n for n, row in enumerate(screen.rows) if row.startswith("          return"))
    code = screen.rows[start : start + 3]
    assert "# a comment" in " ".join(row.strip() for row in code)
    assert all(row.startswith("          ") for row in code if "narrow" in row or "return" in row)


def test_a_transcript_goes_through_the_pager_on_a_terminal(run: Path, tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    pager.write_text("#!/bin/sh\necho shown by the pager\nhead -n 1\n")
    pager.chmod(pager.stat().st_mode | stat.S_IXUSR)

    screen = on_terminal("transcript", str(run), "i0", columns=80, variables={"PAGER": str(pager)})

    assert screen.status == 0  # the pager left before the end: the reader has seen enough
    assert screen.rows[0] == "shown by the pager"
    assert len(screen.rows) == 2


def test_ctrl_c_belongs_to_the_pager(run: Path, tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    pager.write_text(
        "#!/bin/sh\ncat >/dev/null\nfor i in 1 2 3 4; do kill -INT $PPID; sleep 0.2; done\necho still there\n"
    )
    pager.chmod(pager.stat().st_mode | stat.S_IXUSR)

    screen = on_terminal("transcript", str(run), "i0", columns=80, variables={"PAGER": str(pager)})

    assert (screen.status, screen.rows) == (0, ["still there"])


def test_a_missing_pager_is_no_error(run: Path) -> None:
    screen = on_terminal("transcript", str(run), "i0", columns=80, variables={"PAGER": "/no/such/pager"})

    assert screen.status == 0
    assert screen.rows[-1].strip() == "Done."


def test_a_transcript_into_a_file_keeps_long_lines_whole(run: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PAGER": "false"}
    words = [sys.executable, "-m", "holdwater", "transcript", str(run), "i0"]
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=stretch(60), check=True)

    assert "  " + PROMPT.splitlines()[0] in done.stdout.splitlines()


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_page_of_the_manual_fits_its_terminal(columns: int) -> None:
    screen = on_terminal("help", "running", columns=columns)

    assert screen.status == 0
    assert max(cell_len(row) for row in screen.rows) <= columns
    assert "--retry-poison" in " ".join(screen.rows)
