"""Validates and converts the values that the code of suites and agents returns: grades, patches, answers.

`user_calls.py` calls that code.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec

from ..core.authoring import GradeResult, GroupGrades
from ..core.errors import GradeFailed
from ..core.masking import clean_text, mask_text
from ..core.records import Grade

LONGEST_ANSWER = 1024 * 1024  # characters of JSON in a verdict; a longer answer goes to a file of its own
UNFAITHFUL = "a JSON round trip changes the answer"
PLAIN = (str, int, float, bool, type(None))


def as_grade(result: GradeResult) -> Grade:
    """Convert the result of a grade function to a grade. A number from 1 up is a pass."""
    match result:
        case Grade():
            grade = result
        case bool():
            grade = Grade(passed=result, score=float(result))
        case int() | float():
            grade = Grade(passed=result >= 1, score=float(result))
        case _:
            raise _make_grade_error(result)
    try:
        # A record does not check its fields when it is created: a wrong type would fail only later.
        grade = msgspec.structs.replace(grade, detail=clean_text(grade.detail))
        grade = msgspec.msgpack.decode(msgspec.msgpack.encode(grade), type=Grade)
    except (TypeError, ValueError, AttributeError, ArithmeticError, msgspec.MsgspecError) as error:
        raise _make_grade_error(result) from error
    if not math.isfinite(grade.score):
        raise _make_grade_error(result)
    return grade


def as_grades(result: GroupGrades, members: int) -> list[Grade | None]:
    """Convert the result of a group function: a grade for each member, None if the member keeps its own."""
    if result is None:
        return [None] * members
    if not isinstance(result, list | tuple) or len(result) != members:
        shown = _describe(result)[:200]
        raise GradeFailed(
            f"the group function returned {shown}: expected None, or a list with a grade or None for each "
            f"of {members} members",
            kind="type",
        )
    return [None if one is None else as_grade(one) for one in result]


def as_patch(result: Any) -> str:
    """Return the result of a patch function; raise `GradeFailed` if it is not a str."""
    if not isinstance(result, str):
        raise GradeFailed(f"the patch function returned {_describe(result)[:200]}: expected str", kind="type")
    return result


class EncodedAnswer(NamedTuple):
    """An answer as JSON."""

    text: str | None
    lacks: str = ""  # why this text cannot be graded in place of the answer; empty: it can


def encode_answer(answer: Any) -> EncodedAnswer:
    """Encode the answer as JSON, so that a later grading gets the same answer as the first."""
    if answer is None:
        return EncodedAnswer(None)
    try:
        text = msgspec.json.encode(answer).decode()
        same = _alike(answer, msgspec.json.decode(text))
    except (TypeError, ValueError, ArithmeticError, RecursionError):
        return EncodedAnswer(msgspec.json.encode(_describe(answer)).decode(), UNFAITHFUL)
    return EncodedAnswer(mask_text(text), "" if same else UNFAITHFUL)


def _alike(answer: Any, decoded: Any) -> bool:
    """Return whether two values have the same plain types and contents. Runs no foreign code."""
    if type(answer) is not type(decoded):
        return False
    if type(answer) is dict:
        return answer.keys() == decoded.keys() and all(_alike(answer[key], decoded[key]) for key in answer)
    if type(answer) is list:
        return len(answer) == len(decoded) and all(map(_alike, answer, decoded))
    return type(answer) in PLAIN and answer == decoded


def _make_grade_error(result: Any) -> GradeFailed:
    shown = _describe(result)[:200]
    return GradeFailed(
        f"the grade function returned {shown}: expected bool, finite number or `Grade`", kind="type"
    )


def _describe(thing: Any) -> str:
    """Return the `repr` of a foreign object, or its type if `repr` fails."""
    try:
        return clean_text(repr(thing))
    except Exception:  # boundary: the object's own `__repr__`  # noqa: BLE001
        return f"<{type(thing).__name__}>"
