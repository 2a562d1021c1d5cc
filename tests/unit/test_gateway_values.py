"""Values are counted outside of strings, however the text is cut; members of an object have one key each."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdwater.gateway import json_checks
from holdwater.gateway.json_checks import OverfullRequest, ValueCount, check_values, decode_members

STRINGS = st.text(alphabet='ab,[{\\"\n', max_size=9)
JSON = st.recursive(
    st.one_of(st.integers(), STRINGS, st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(STRINGS, inner, max_size=4)),
    max_leaves=20,
)


def count(value: Any) -> int:
    """Opening brackets and commas."""
    if not isinstance(value, list | dict):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(0, len(inner) - 1) + sum(map(count, inner))


@given(JSON, st.integers(0, 1000), st.sampled_from([1, 2, 3, 7, 100_000]))
def test_what_separates_values_is_counted_outside_of_strings(value: Any, cut: int, size: int) -> None:
    text = bytearray(json.dumps(value).encode())
    expected = count(value)
    before, json_checks.SLICE = json_checks.SLICE, size
    try:
        for most, fits in ((expected, True), (expected - 1, False)):
            found = ValueCount(most)
            try:
                found.scan(text[: cut % (len(text) + 1)])
                found.scan(text)
                assert fits
            except OverfullRequest:
                assert not fits
    finally:
        json_checks.SLICE = before


@pytest.mark.parametrize("text", [b"[" + b"1," * 500_001 + b"1]", b"[" + b"{}," * 300_000 + b"1]"])
def test_a_text_of_too_many_values_is_refused(text: bytes) -> None:
    with pytest.raises(OverfullRequest, match="more than 500000 values"):
        check_values(text)


def test_a_text_of_too_many_blanks_is_refused() -> None:
    with pytest.raises(OverfullRequest, match="outside of strings"):
        check_values(b"[" + b" " * 40_000_000 + b"]")


def test_a_long_text_full_of_commas_is_one_value() -> None:
    check_values(json.dumps(['a, b [c] {d} \\ "e" ' * 200_000]).encode())


BLANKS = st.sampled_from(["", " ", "\n\t"])
KEYS = st.sampled_from(["a", "b", "a\\u0062", "ab", "c"])
VALUES = st.sampled_from(["1", "12", '"x,"', '{"a":1,"a":2}', "[1, 2]", '","', "null"])


@given(st.lists(st.tuples(KEYS, VALUES, BLANKS), max_size=5))
def test_an_object_is_refused_if_and_only_if_it_repeats_a_key(members: list[tuple[str, str, str]]) -> None:
    written = [f'{blank}"{key}"{blank}:{blank}{value}{blank}' for key, value, blank in members]
    text = "{" + ",".join(written) + "}"
    names = [json.loads(f'"{key}"') for key, _, _ in members]
    try:
        found = decode_members(bytearray(text.encode()))
        assert list(found) == names
    except msgspec.ValidationError as error:
        assert "duplicate key" in str(error)
        assert len(set(names)) < len(names)
