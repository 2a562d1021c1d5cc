"""Keys are taken out of bytes in whatever pieces and forms they come; all other bytes stay as they are."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdwater.gateway.upstreams.scrubbing import ScrubbedStream, SecretScrubber

KEYS = ("sk-proj/ab-CD_12-sk-prZ9", "AIzaSyTest-key_00")
_ESCAPE = re.compile(rb"\\+u00([0-9a-fA-F]{2})|\\+(/)")


def decoded(text: bytes) -> bytes:
    """`text` as a reader of JSON sees it, however often it was escaped."""
    return _ESCAPE.sub(lambda match: bytes.fromhex(match[1].decode()) if match[1] else b"/", text)


@st.composite
def written(draw: st.DrawFn) -> str:
    """A key of which any character may be escaped."""
    backslashes = "\\" * draw(st.sampled_from([1, 2, 4]))
    forms = []
    for character in draw(st.sampled_from(KEYS)):
        escapes = [character, f"{backslashes}u{ord(character):04x}", f"{backslashes}u{ord(character):04X}"]
        forms.append(draw(st.sampled_from([*escapes, backslashes + "/"] if character == "/" else escapes)))
    return "".join(forms)


NOISE = st.text(alphabet='sk-prAIz \\u002d"\n/x', max_size=12)
TEXTS = st.lists(st.one_of(NOISE, written(), st.sampled_from([KEYS[0][:-1], KEYS[1][:5]])), max_size=6)


def passed(text: bytes, cuts: list[int]) -> bytes:
    stream = ScrubbedStream(SecretScrubber(KEYS))
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return b"".join([stream.feed(text[start:end]) for start, end in pairwise(places)]) + stream.flush()


@given(TEXTS, st.lists(st.integers(0, 10_000), max_size=12))
def test_no_key_comes_through_however_it_is_cut(texts: list[str], cuts: list[int]) -> None:
    text = "".join(texts).encode()

    out = passed(text, cuts)

    has_key = any(key.encode() in decoded(text) for key in KEYS)
    assert not any(key.encode() in decoded(out) for key in KEYS)
    assert has_key or out == text


@pytest.mark.parametrize("end", ["data: {}\n\n", "hello world", '{"a": "b"}', "\\n", "caf\\u00e9 and so on"])
def test_what_begins_no_key_is_not_held(end: str) -> None:
    stream = ScrubbedStream(SecretScrubber(KEYS))

    assert stream.feed(end.encode()) == end.encode()


def test_only_the_beginning_of_a_key_is_held() -> None:
    stream = ScrubbedStream(SecretScrubber(KEYS))

    assert stream.feed(b"the key is sk-proj/ab") == b"the key is "
    assert stream.feed(b", or not") == b"sk-proj/ab, or not"


def test_a_key_that_is_too_short_to_protect_is_left() -> None:
    assert SecretScrubber(["short"]).scrub(b"a short text") == b"a short text"
