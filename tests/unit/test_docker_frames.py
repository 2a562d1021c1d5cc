"""What a command printed is the same however the daemon's stream was cut into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdwater.docker.client import STDERR, FrameDecoder

PRINTED = st.lists(st.tuples(st.sampled_from([1, STDERR]), st.binary(max_size=40)), max_size=8)


@given(PRINTED, st.lists(st.integers(1, 30), min_size=1))
def test_the_streams_are_separated_wherever_the_pieces_end(
    printed: list[tuple[int, bytes]], sizes: list[int]
) -> None:
    sent = b"".join(
        bytes([stream, 0, 0, 0]) + len(text).to_bytes(4, "big") + text for stream, text in printed
    )
    frames, got = FrameDecoder(), {1: b"", STDERR: b""}

    turn = 0
    while sent:
        size = sizes[turn % len(sizes)]
        for stream, text in frames.feed(sent[:size]):
            got[stream] += text
        sent, turn = sent[size:], turn + 1

    for stream, told in got.items():
        assert told == b"".join(text for which, text in printed if which == stream)
