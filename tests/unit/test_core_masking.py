"""Keys are hidden however the bytes around them are cut."""

import io
import secrets

from hypothesis import given, settings
from hypothesis import strategies as st

from holdwater.core.masking import (
    KEY_LENGTH,
    KEY_PREFIX,
    KeyMask,
    MaskedFile,
    mask_bytes,
    mask_text,
    unmask_bytes,
)

KEYS = [f"{KEY_PREFIX}{secrets.token_urlsafe(32)}".encode() for _ in range(3)]
MASK = f"{KEY_PREFIX}{'x' * KEY_LENGTH}".encode()
parts = st.sampled_from([*KEYS, MASK, b"sk-hw-short", b"s", b"sk-", b"text\n", b"-_", b"\xff", b"y" * 300])
contents = st.lists(parts, max_size=12).map(b"".join)


def test_a_key_has_the_length_that_is_looked_for():
    assert {len(key) for key in KEYS} == {len(MASK)}


@settings(deadline=None)
@given(contents)
def test_a_mask_hides_every_key_and_changes_no_length(content):
    masked = mask_bytes(content)

    assert len(masked) == len(content)
    assert not any(key in masked for key in KEYS)
    assert mask_bytes(masked) == masked
    assert mask_text("café \udce9 " + KEYS[0].decode()) == "café \udce9 " + MASK.decode()


@settings(deadline=None)
@given(contents, st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_a_stream_is_masked_as_the_whole_is(content, sizes):
    mask, out, at = KeyMask(), b"", 0
    while at < len(content):
        for size in sizes:
            out += mask.feed(content[at : at + size])
            at += size

    assert out + mask.flush() == mask_bytes(content)


@settings(deadline=None)
@given(contents, st.integers(1, 2000))
def test_a_file_of_text_is_masked_as_the_whole_is(content, size):
    file, out = MaskedFile(io.BytesIO(content + b"not of the file"), len(content)), b""
    while piece := file.read(size):
        out += piece

    assert out == mask_bytes(content)


def test_a_file_that_is_no_text_stays_as_it_is():
    content = b"\0" + KEYS[0]

    assert MaskedFile(io.BytesIO(content), len(content)).read() == content


def test_another_attempt_gets_its_own_key_back():
    assert unmask_bytes(mask_bytes(b"say " + KEYS[0]), KEYS[1].decode()) == b"say " + KEYS[1]
