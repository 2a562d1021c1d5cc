"""However an attempt ends, nothing of it waits for a collection: it is freed when the last lets go of it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.in_process_run import COUNT, QUICK, suite

import holdwater as hw
from holdwater.api import runs as api
from holdwater.testing.leaks import count_objects

OF_AN_ATTEMPT = {"AttemptState", "Scope", "Session", "AttemptLog", "ProcessSandbox"}
NEVER = 100.0  # seconds: longer than any limit here


class History:
    """Something large that an agent keeps while it acts, and that can be watched."""

    made: ClassVar[weakref.WeakSet[History]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.messages = [{"role": "user", "content": "x" * 100_000}]
        self.made.add(self)


async def answers(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> str:
    history = History()
    await sandbox.run("echo $$")
    return str(len(history.messages))


async def raises(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
    history = History()
    raise ValueError(len(history.messages))


def raises_in_a_thread(instance: hw.Instance, sandbox: Any, model: Any) -> None:
    history = History()
    raise ValueError(len(history.messages))


async def keeps_its_error(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
    history = History()
    try:
        raise ValueError(len(history.messages))
    except ValueError as error:
        history.error = error  # type: ignore[attr-defined]
        raise


async def never_ends(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
    history = History()
    await asyncio.sleep(NEVER * len(history.messages))


async def command_never_ends(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
    history = History()
    await sandbox.run(f"sleep {NEVER * len(history.messages)}")


def command_of_a_thread_never_ends(instance: hw.Instance, sandbox: Any, model: Any) -> None:
    history = History()
    sandbox.run(f"sleep {NEVER * len(history.messages)}")


async def command_is_missing(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
    history = History()
    await sandbox.run(["/no/such/program", str(len(history.messages))])


async def talks(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
    history = History()
    for _ in range(3):
        reply = await model.chat(history.messages)
        history.messages.append(reply["choices"][0]["message"])


def talks_in_a_thread(instance: hw.Instance, sandbox: Any, model: Any) -> None:
    history = History()
    model.chat(history.messages)


async def reply(request: Any) -> dict[str, str]:
    return {"role": "assistant", "content": "so it is"}


async def no_reply(request: Any) -> dict[str, str]:
    await asyncio.sleep(NEVER)
    return {}


async def failed_reply(request: Any) -> dict[str, str]:
    raise RuntimeError("the model is down")


def cannot_grade(instance: hw.Instance, sandbox: Any, answer: Any) -> bool:
    raise RuntimeError("no grade")


@pytest.fixture
def uncollected() -> Iterator[None]:
    """References alone decide what lives."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    ("agent", "options"),
    [
        (answers, {}),
        (raises, {}),
        (raises_in_a_thread, {}),
        (keeps_its_error, {}),
        (never_ends, {"timeout": 0.2}),
        (command_never_ends, {"timeout": 0.2}),
        (command_of_a_thread_never_ends, {"timeout": 0.2}),
        (command_is_missing, {}),
        (talks, {"policy": reply}),
        (talks_in_a_thread, {"policy": reply}),
        (talks, {"policy": failed_reply}),
        (talks, {"policy": no_reply, "timeout": 0.3}),
        (talks_in_a_thread, {"policy": no_reply, "timeout": 0.3}),
        (answers, {"grade": cannot_grade}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(_called(value)),
)
def test_nothing_of_an_attempt_waits_for_a_collection(
    tmp_path: Path, agent: Callable[..., Any], options: dict[str, Any]
) -> None:
    before = count_objects()

    attempts = play(tmp_path / "run", agent, **options)

    assert attempts == COUNT
    assert len(History.made) == 0
    assert [name for name in count_objects() - before if name.rpartition(".")[2] in OF_AN_ATTEMPT] == []


def play(out: Path, agent: Callable[..., Any], **options: Any) -> int:
    """A run in this process, whose model is a function; how many attempts it made."""
    parts = {"grade": options.pop("grade")} if "grade" in options else {}
    policy = options.pop("policy", None)
    said = {**QUICK, "retries": 0, **options}
    if policy is not None:
        said |= {"model": "policy", "base_url": "policy:"}
    prepared = api.prepare(suite(**parts), agent, out, said)  # type: ignore[arg-type]

    async def conduct() -> int:
        return (await api.start(prepared, policy=policy)).attempts

    return asyncio.run(conduct())


def _called(options: dict[str, Any]) -> list[str]:
    return [value.__name__ for value in options.values() if callable(value)]
