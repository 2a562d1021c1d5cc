"""What the code of suites and agents returned, as something that can be written down: validated once, here.

Calling that code is in `calls.py`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec

from ..core.authoring import GradeResult, GroupGrades
from ..core.errors import GradeFailed
from ..core.masking import mask_text
from ..core.records import Grade
from ..core.text import clean_text

LONGEST_ANSWER = 1024 * 1024  # characters of JSON in a verdict; a longer answer is a file of its own
UNFAITHFUL = "JSON does not give the answer back as it was"
PLAIN = (str, int, float, bool, type(None))


def as_grade(result: GradeResult) -> Grade:
    """What a grade function returned, as a grade. A number passes from 1 up."""
    match result:
        case Grade():
            grade = result
        case bool():
            grade = Grade(passed=result, score=float(result))
        case int() | float():
            grade = Grade(passed=result >= 1, score=float(result))
        case _:
            raise _no_grade(result)
    try:
        # A record does not check its fields when it is made: a foreign type would be refused further on.
        grade = msgspec.structs.replace(grade, detail=clean_text(grade.detail))
        grade = msgspec.msgpack.decode(msgspec.msgpack.encode(grade), type=Grade)
    except (TypeError, ValueError, AttributeError, ArithmeticError, msgspec.MsgspecError) as error:
        raise _no_grade(result) from error
    if not math.isfinite(grade.score):
        raise _no_grade(result)
    return grade


def as_grades(result: GroupGrades, members: int) -> list[Grade | None]:
    """What a group function returned: a grade for each member, None where its own stays."""
    if result is None:
        return [None] * members
    if not isinstance(result, list | tuple) or len(result) != members:
        shown = _described(result)[:200]
        raise GradeFailed(
            f"the group function returned {shown}: expected None, or a list with a grade or None for each "
            f"of {members} members",
            kind="type",
        )
    return [None if one is None else as_grade(one) for one in result]


def as_patch(result: Any) -> str:
    """What a patch function returned, if it is one."""
    if not isinstance(result, str):
        raise GradeFailed(
            f"the patch function returned {_described(result)[:200]}: expected str", kind="type"
        )
    return result


class EncodedAnswer(NamedTuple):
    """An answer as JSON."""

    text: str | None
    lacks: str = ""  # why a grading by this text is not a grading of the answer; empty: it is


def encode_answer(answer: Any) -> EncodedAnswer:
    """The answer as JSON, so that a later grading is given what the first was given."""
    if answer is None:
        return EncodedAnswer(None)
    try:
        text = msgspec.json.encode(answer).decode()
        same = _alike(answer, msgspec.json.decode(text))
    except (TypeError, ValueError, ArithmeticError, RecursionError):
        return EncodedAnswer(msgspec.json.encode(_described(answer)).decode(), UNFAITHFUL)
    return EncodedAnswer(mask_text(text), "" if same else UNFAITHFUL)


def _alike(answer: Any, decoded: Any) -> bool:
    """Whether two values are of the same plain types with the same content; no foreign code is asked."""
    if type(answer) is not type(decoded):
        return False
    if type(answer) is dict:
        return answer.keys() == decoded.keys() and all(_alike(answer[key], decoded[key]) for key in answer)
    if type(answer) is list:
        return len(answer) == len(decoded) and all(map(_alike, answer, decoded))
    return type(answer) in PLAIN and answer == decoded


def _no_grade(result: Any) -> GradeFailed:
    shown = _described(result)[:200]
    return GradeFailed(
        f"the grade function returned {shown}: expected bool, finite number or `Grade`", kind="type"
    )


def _described(thing: Any) -> str:
    """A foreign object in words, also where it has none itself."""
    try:
        return clean_text(repr(thing))
    except Exception:  # boundary: its own code  # noqa: BLE001
        return f"<{type(thing).__name__}>"
