"""The variables of `--env`: names are checked, and values come from the user or the environment."""

from __future__ import annotations

import pytest

from holdwater.core.errors import BadInput
from holdwater.run.setup.agent_variables import LONGEST_VALUE, parse_names, read_values


def test_a_value_is_the_users_or_the_environments() -> None:
    given = ["A=1", "B", "A=2=3", "EMPTY="]

    assert parse_names(given) == ("A", "B", "EMPTY")
    assert read_values(("A", "B", "EMPTY"), given, {"A": "no", "B": "b"}) == {
        "A": "2=3",
        "B": "b",
        "EMPTY": "",
    }


def test_the_library_takes_a_mapping_too() -> None:
    given = {"A": "1", "B": None}

    assert parse_names(given) == ("A", "B")
    assert read_values(("A", "B"), given, {"B": "b"}) == {"A": "1", "B": "b"}


def test_a_resume_takes_the_values_of_names_that_it_is_not_given() -> None:
    assert read_values(("A", "B"), ["B=new"], {"A": "a", "B": "old"}) == {"A": "a", "B": "new"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("", "for example"),
        ("A B", "for example"),
        ("1A", "for example"),
        ("PATH", "`--mount"),
        ("HOME", "each sandbox sets it"),
        ("OPENAI_API_KEY", "a key of its own"),
        ("OPENAI_BASE_URL", "`--base-url`"),
        ("HOLDWATER_MODEL", "belong to holdwater"),
        ("UID", "the shell"),
    ],
)
def test_a_name_that_an_agent_cannot_get_is_refused_without_its_value(name: str, hint: str) -> None:
    with pytest.raises(BadInput, match="invalid name for `--env`") as caught:
        parse_names([f"{name}=tok-Secret-123456"])

    assert hint in caught.value.hint and "tok-Secret" not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    ("value", "problem"),
    [("a\0b", "NUL"), ("a\udce9", "UTF-8"), ("v" * (LONGEST_VALUE + 1), "32769 bytes"), (None, "not set")],
)
def test_a_value_that_an_agent_cannot_get_is_refused(value: str | None, problem: str) -> None:
    with pytest.raises(BadInput, match=rf"^`--env A`: .*{problem}"):
        read_values(("A",), {"A": value}, {})
