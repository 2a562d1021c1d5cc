"""Logs by context, with real threads: a record goes to its own attempt's file, or elsewhere, or nowhere."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdwater.rollout import logs
from holdwater.rollout.logs import open_attempt_log, route_output
from holdwater.rollout.user_calls import UserCalls

log = logging.getLogger("agent")


@contextmanager
def routing() -> Iterator[list[str]]:
    """What is said inside is routed; the lines that went elsewhere."""
    lines: list[str] = []
    with route_output(lines.append):
        yield lines


def in_threads(name: int, depth: int) -> None:
    """Say 25 things: in this thread, in an executor, in a thread that it starts, and so on below."""
    for number in range(10):
        log.info("attempt=%d depth=%d number=%d", name, depth, number)
    with ThreadPoolExecutor(2) as pool:
        for number in range(10):
            pool.submit(log.warning, "attempt=%d depth=%d pooled=%d", name, depth, number)
    for number in range(5):
        print(f"attempt={name} depth={depth} printed={number}")
    if depth < 3:
        thread = threading.Thread(target=in_threads, args=(name, depth + 1))
        thread.start()
        thread.join()


async def test_2000_records_of_20_attempts_are_in_the_right_files(tmp_path):
    async def attempt(name: int) -> None:
        with open_attempt_log(lambda: tmp_path / f"{name}.log"):
            log.info("attempt=%d on the loop", name)
            await asyncio.sleep(0)
            await UserCalls("t").call(in_threads, name, 0)

    with routing() as elsewhere:
        async with asyncio.TaskGroup() as group:
            for name in range(20):
                group.create_task(attempt(name))

    for name in range(20):
        lines = (tmp_path / f"{name}.log").read_text().splitlines()
        assert len(lines) == len(set(lines)) == 101
        assert all(f"attempt={name} " in line for line in lines)
    assert elsewhere == []


async def test_what_a_thread_writes_after_its_attempt_goes_nowhere_and_raises_nothing(tmp_path, capsys):
    release, raised = threading.Event(), []

    def zombie() -> None:
        release.wait()
        try:
            log.error("late")
            print("late")
            sys.stderr.flush()
        except BaseException as error:
            raised.append(error)

    with routing() as elsewhere:
        with open_attempt_log(lambda: tmp_path / "a.log"):
            log.info("in time")
            thread = threading.Thread(target=zombie)
            thread.start()
        release.set()
        await asyncio.get_running_loop().run_in_executor(None, thread.join)

    assert (tmp_path / "a.log").read_text().endswith("in time\n")
    assert (raised, elsewhere, capsys.readouterr().out) == ([], [], "")


def test_records_of_no_attempt_go_elsewhere_and_prints_to_the_stream(tmp_path, capsys):
    with routing() as elsewhere:
        with open_attempt_log(lambda: tmp_path / "a.log"):
            pass
        log.info("after %s", "all")
        print("printed")

    assert [line.split(" ", 2)[2] for line in elsewhere] == ["INFO agent after all\n"]
    assert capsys.readouterr().out == "printed\n"
    assert not (tmp_path / "a.log").exists(), "a quiet attempt leaves no file"


def test_a_record_that_cannot_be_formatted_is_still_a_fact(monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own would raise
    with routing() as elsewhere:
        log.info("%d", "no number")

    assert "INFO agent unformattable record" in elsewhere[0]


def test_what_has_no_utf_8_is_escaped(tmp_path):
    with routing(), open_attempt_log(lambda: tmp_path / "a.log"):
        print("\ud800 \u00e9")

    assert (tmp_path / "a.log").read_bytes() == b"\\ud800 \xc3\xa9\n"


def test_a_file_that_cannot_be_written_is_an_error_of_the_sink(tmp_path):
    with routing(), open_attempt_log(lambda: tmp_path / "missing" / "a.log") as sink:
        print("said")

    assert isinstance(sink.error, FileNotFoundError)


def test_a_log_is_cut_where_it_is_longer_than_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "LONGEST_LOG", 1000)
    with routing(), open_attempt_log(lambda: tmp_path / "a.log"):
        for _ in range(100):
            print("x" * 99)

    text = (tmp_path / "a.log").read_text()
    assert len(text) < 1100
    assert text.endswith("[the log ends here: it is longer than is kept]\n")


def test_a_thread_keeps_its_own_run_and_can_be_a_subclass(tmp_path):
    class Said(threading.Thread):
        def run(self) -> None:
            print(self.name)

    with routing(), open_attempt_log(lambda: tmp_path / "a.log"):
        replaced = threading.Thread()
        replaced.run = lambda: print("replaced")  # type: ignore[method-assign]
        for thread in (Said(name="sub"), replaced, threading.Timer(0, print, ["timed"])):
            thread.start()
            thread.join()

    assert (tmp_path / "a.log").read_text() == "sub\nreplaced\ntimed\n"


def test_bytes_can_be_written_to_the_stream_as_to_any_other(tmp_path):
    with routing(), open_attempt_log(lambda: tmp_path / "a.log"):
        sys.stdout.buffer.write(b"raw \xff\n")
        sys.stdout.buffer.flush()

    assert (tmp_path / "a.log").read_bytes() == b"raw \\xff\n"


def test_everything_is_put_back_when_the_routing_ends(monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(sys, "stdout", io.StringIO())

    def patched() -> list[object]:
        patches = [sys.stdout, sys.stderr, threading.Thread.start, ThreadPoolExecutor.submit]
        return [*patches, root.level, *root.handlers]

    before = patched()
    with pytest.raises(ZeroDivisionError), route_output(lambda line: None):
        assert all(now is not then for now, then in zip(patched()[:4], before[:4], strict=True))
        _ = 1 / 0

    assert patched() == before


def test_one_attempt_inside_another_context_gives_the_outer_one_back(tmp_path: Path):
    with routing(), open_attempt_log(lambda: tmp_path / "outer.log"):
        with open_attempt_log(lambda: tmp_path / "inner.log"):
            print("inner")
        print("outer")

    assert (tmp_path / "outer.log").read_text() == "outer\n"
    assert (tmp_path / "inner.log").read_text() == "inner\n"
