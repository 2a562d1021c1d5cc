"""Segments: what was written is read back; a torn tail ends it, damage before the end is reported."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdwater.core.errors import LedgerCorrupt
from holdwater.ledger.segment import HEADER, Segment, make_frame, read_records

payloads = st.lists(
    st.binary(max_size=300) | st.binary(max_size=5).map(lambda b: b * 100), min_size=1, max_size=4
)


@settings(max_examples=15, deadline=None)
@given(payloads)
def test_a_tail_torn_at_any_byte_leaves_the_whole_records(records: list[bytes]) -> None:
    frames = [make_frame(record) for record in records]
    content = b"".join(frames)
    ends = [sum(map(len, frames[: n + 1])) for n in range(len(frames))]
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "a.seg"
        for cut in range(len(content) + 1):
            path.write_bytes(content[:cut])
            whole = sum(1 for end in ends if end <= cut)

            assert list(read_records(path)) == records[:whole]


@settings(max_examples=40, deadline=None)
@given(payloads, st.data())
def test_a_torn_segment_is_cut_on_open_and_goes_on(records: list[bytes], data: st.DataObject) -> None:
    frames = [make_frame(record) for record in records]
    cut = data.draw(st.integers(1, len(frames[-1])))
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "a.seg"
        path.write_bytes(b"".join(frames)[:-cut])

        segment = Segment.open(path)
        segment.append(b"after")
        segment.close()

        assert list(read_records(path)) == [*records[:-1], b"after"]


@settings(max_examples=60, deadline=None)
@given(payloads, st.data())
def test_damage_before_the_last_record_is_reported(records: list[bytes], data: st.DataObject) -> None:
    frames = [make_frame(record) for record in [*records, b"the last"]]
    content = bytearray(b"".join(frames))
    at = data.draw(st.integers(0, len(content) - len(frames[-1]) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "a.seg"
        path.write_bytes(content)

        with pytest.raises(LedgerCorrupt, match="damaged at byte"):
            list(read_records(path))


def test_pages_that_power_loss_zeroed_are_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "a.seg"
    path.write_bytes(make_frame(b"first") + make_frame(b"x" * 500)[:HEADER] + bytes(9000))

    assert list(read_records(path)) == [b"first"]


def test_a_torn_record_that_holds_a_whole_frame_is_no_damage(tmp_path: Path) -> None:
    # an agent can send anything, also what looks like one of our frames
    path = tmp_path / "a.seg"
    path.write_bytes(make_frame(b"first") + make_frame(bytes(range(100)) + make_frame(b"forged"))[:-1])

    assert list(read_records(path)) == [b"first"]
