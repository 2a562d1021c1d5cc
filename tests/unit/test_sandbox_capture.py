"""Bounded output, against what a list of everything would say."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdwater.sandbox.capture import KEPT, CommandLog, StreamCapture


@given(st.lists(st.integers(0, 3 * KEPT), max_size=8))
def test_the_first_and_the_last_are_kept(sizes):
    chunks = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    everything = b"".join(chunks).decode()
    capture = StreamCapture()

    for chunk in chunks:
        capture.feed(chunk)

    if len(everything) <= 2 * KEPT:
        assert capture.text() == everything
        assert not capture.truncated
    else:
        left_out = f"\n[... {len(everything) - 2 * KEPT} bytes left out ...]\n"
        assert capture.text() == everything[:KEPT] + left_out + everything[-KEPT:]
        assert capture.truncated


def test_a_log_is_cut_once_at_its_limit_with_a_note(tmp_path):
    path = tmp_path / "new" / "log"
    log = CommandLog(path, limit=10)

    for chunk in (b"12345", b"67890abc", b"more"):
        log.write(chunk)
    log.close()

    assert path.read_text() == "1234567890\n[... cut: more than 10 bytes ...]\n"


def test_a_log_that_cannot_be_written_keeps_its_error_and_accepts_more():
    log = CommandLog(Path("/dev/full"), limit=100)

    log.write(b"x")
    log.write(b"y")
    log.close()

    assert log.error is not None
    with pytest.raises(OSError, match="No space"):
        raise log.error
