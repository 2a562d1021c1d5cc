"""Keys and values of variables are hidden however the bytes around them are cut."""

import io
import json
import secrets
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdwater.core.masking import (
    KEY_LENGTH,
    KEY_PREFIX,
    KeyMask,
    MaskedFile,
    hide_values,
    is_secret,
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


QUOTED = 'say "Grüße" \\ twice\n'
VALUES = {"TOKEN": "tok-Secret-123456", "LONGER": "tok-Secret-123456-and-more", "QUOTED": QUOTED}
pieces = st.sampled_from(
    [*VALUES.values(), "tok-Secret", "-and-more", "tok", "t", "text\n", "y" * 300, "sk-"]
)
texts = st.lists(pieces, max_size=12).map(lambda found: "".join(found).encode())


@pytest.fixture
def hidden() -> Iterator[None]:
    with hide_values(VALUES):
        yield


@pytest.mark.usefixtures("hidden")
class TestHiddenValues:
    @settings(deadline=None)
    @given(texts)
    def test_a_mask_hides_every_value_and_changes_no_length(self, content):
        masked = mask_bytes(content)

        assert len(masked) == len(content)
        assert not any(value.encode() in masked for value in VALUES.values())
        assert unmask_bytes(masked, "key") == content

    @settings(deadline=None)
    @given(texts, st.lists(st.integers(1, 60), min_size=1, max_size=40))
    def test_a_stream_is_masked_as_the_whole_is(self, content, sizes):
        mask, out, at = KeyMask(), b"", 0
        while at < len(content):
            for size in sizes:
                out += mask.feed(content[at : at + size])
                at += size
        out += mask.flush()

        assert len(out) == len(content)
        assert not any(value.encode() in out for value in VALUES.values())

    @settings(deadline=None)
    @given(texts, st.integers(1, 2000))
    def test_a_file_is_masked_as_the_whole_is(self, content, size):
        file, out = MaskedFile(io.BytesIO(content), len(content)), b""
        while piece := file.read(size):
            out += piece

        assert out == mask_bytes(content)

    @pytest.mark.parametrize("encode", [json.dumps, lambda text: msgspec.json.encode(text).decode()])
    @pytest.mark.parametrize("times", [1, 2])
    def test_a_value_is_found_in_json_and_stays_json(self, encode, times):
        text = f"it is {QUOTED}, {VALUES['TOKEN']}"
        for _ in range(times):
            text = encode(text)

        masked = mask_text(text)
        for _ in range(times):
            masked = json.loads(masked)

        assert "Gr" not in masked and "tok-Secret" not in masked and masked.startswith("it is env-3-xxx")


def test_a_value_is_hidden_until_its_block_ends():
    with hide_values({"A": "first-Value"}), hide_values({"B": "other-Value"}):
        assert mask_text("first-Value other-Value") == "env-1-xxxxx env-1-xxxxx"
    assert mask_text("first-Value other-Value") == "first-Value other-Value"


@pytest.mark.parametrize("value", ["", "1", "true", "Secret7", "assistant", "12345678", "0.12345"])
def test_a_short_value_or_word_is_no_secret(value):
    assert not is_secret(value)
    with hide_values({"A": value}):
        assert mask_text(f"x {value} y") == f"x {value} y"


@pytest.mark.parametrize("value", ["Secret78", "topsecretvalue", "123456789012", "a b c d e", "p@ssword"])
def test_a_longer_value_is_a_secret(value):
    assert is_secret(value)
