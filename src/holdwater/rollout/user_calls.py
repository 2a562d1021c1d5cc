"""Calls the code of suites and agents, and validates its results: grades, patches, answers.

`def` runs in a thread of its own, `async def` in a task of its own. No call uses asyncio's default pool: a
hung one would keep one of its few threads for ever. A thread cannot be killed and a task can ignore its
cancellation: `UserCalls.alive` counts the calls that still run.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from ..core.authoring import GradeResult, GroupGrades
from ..core.errors import GradeFailed, ResourceExhausted, drop_tracebacks
from ..core.masking import clean_text, mask_text
from ..core.records import Grade
from .scope import abandon
from .views import is_async

CANCEL_SECONDS = 1.0  # for a cancelled task to end
LONGEST_ANSWER = 1024 * 1024  # characters of JSON in a verdict; a longer answer goes to a file of its own
UNFAITHFUL = "a JSON round trip changes the answer"
PLAIN = (str, int, float, bool, type(None))


class UserCalls:
    """The calls of one attempt."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._alive = 0
        self._lock = threading.Lock()

    @property
    def alive(self) -> int:
        """The number of calls that still run, including abandoned ones."""
        return self._alive

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a plain or `async` function; return its result. Cancelling always ends the wait for it."""
        if is_async(function):
            return await self._run_in_task(function(*arguments, **named))
        result = await self._run_in_thread(partial(function, *arguments, **named))
        return await self._run_in_task(result) if inspect.isawaitable(result) else result

    async def _run_in_task(self, work: Any) -> Any:
        task = asyncio.ensure_future(_guard_work(work))
        self._count(1)
        task.add_done_callback(self._on_task_done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done():
                raise
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
            if not task.done():
                abandon(task)
            raise

    def _on_task_done(self, task: asyncio.Future[Any]) -> None:
        self._count(-1)
        if not task.cancelled():
            task.exception()  # marks it as retrieved; a caller that still waits gets it all the same

    async def _run_in_thread(self, function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def deliver(result: Any, error: Exception | None) -> None:
            if future.done():
                if error is not None:
                    drop_tracebacks(error)  # the caller is gone, and the error is part of a reference cycle
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def body() -> None:
            result: Any = None
            error: Exception | None = None
            try:
                result = function()
            except BaseException as raised:  # boundary: delivered to the caller  # noqa: BLE001
                error = _make_harmless(raised)
            self._count(-1)
            try:
                loop.call_soon_threadsafe(deliver, result, error)
            except RuntimeError:  # the loop is closed: no caller waits any more
                return

        self._count(1)
        try:
            threading.Thread(target=body, name=self._name, daemon=True).start()
        except RuntimeError as error:
            self._count(-1)
            raise ResourceExhausted(f"cannot start a thread: {error}", kind="threads") from error
        return await future

    def _count(self, change: int) -> None:
        with self._lock:
            self._alive += change


async def _guard_work(work: Any) -> Any:
    """Await `work`. A `sys.exit` or a cancellation that it raises by itself becomes an ordinary error."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as raised:
        if being_cancelled():
            raise
        raise _make_harmless(raised) from raised


def being_cancelled() -> bool:
    """Return whether this task is being cancelled.

    A function of its own: a frame that an error passes through must not hold its own task.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _make_harmless(error: BaseException) -> Exception:
    """Convert an exception of foreign code to one that ends its attempt, not the loop or the process."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):  # no future can hold it
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


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
