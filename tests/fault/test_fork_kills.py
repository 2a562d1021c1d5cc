"""kill -9 of a fork, and of a search for the lost turn: resumed, neither pays for a turn again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Scene, lines, serving, until

from holdwater.ledger.durable_files import replace_file

TURNS, AT, BRANCHES = 6, 3, 3
MODEL = """
import asyncio, itertools, sys
from holdwater.testing.scripted_model import ScriptedReply, serve_script

numbers = itertools.count()

def say(request):
    with open(sys.argv[1], "a") as trace:
        trace.write(f"{len(request['messages'])}\\n")
    return ScriptedReply(text=f"reply {next(numbers)}")

async def main():
    async with serve_script(say) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
SUITE = """
import asyncio
import holdwater as hw


def instances():
    yield hw.Instance(id="one")


async def solve(instance, sandbox, model):
    messages = [{"role": "user", "content": instance.id}]
    for turn in range(TURNS):
        reply = await model.chat(messages)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "go on"}]
        with open(TRACE, "a") as trace:
            trace.write(f"{turn}\\n")
        while turn == TURNS - 2 and open(TRACE).read().count(str(turn)) > int(open(GO).read()):
            await asyncio.sleep(0.02)


suite = hw.Suite(name="talking", instances=instances, grade=lambda instance, sandbox, answer: False)
"""


@pytest.fixture
def origin(scene: Scene) -> Iterator[Path]:
    """A finished run of one attempt, whose model counts what it is asked.

    `go` has the number of attempts that may pass their last turn but one; the others wait there.
    """
    place = scene.place
    scene.suite(SUITE, TRACE=str(place / "trace"), GO=str(place / "go"), TURNS=TURNS)
    (place / "go").write_text("1")
    with serving("-c", MODEL, str(place / "asked")) as url:
        options = ("--model", "m", "--base-url", url, "--workers", "1")
        assert scene.run(*scene.agent(), *options).wait() == 0
        (place / "trace").unlink()
        assert len(lines(place / "asked")) == TURNS
        yield scene.out


def test_a_killed_fork_is_resumed_and_pays_for_nothing_twice(scene: Scene, origin: Path) -> None:
    scene.out = scene.place / "fork"
    replace_file(scene.place / "go", b"0")
    words = ("fork", str(origin), "one", "--turn", str(AT), "--samples", str(BRANCHES))
    command = scene.start(*words, "--out", str(scene.out), "--json")
    waiting = [f"{TURNS - 2}\n"] * BRANCHES
    until("every branch has its first live replies", lambda: count_waiting(scene) == waiting)
    command.kill()

    replace_file(scene.place / "go", b"100")
    command = scene.resume()

    assert command.wait() == 0, command
    assert len(lines(scene.place / "asked")) == TURNS + BRANCHES * (TURNS - AT)
    summary = command.document()
    assert summary["outcomes"] == {"failed": BRANCHES} and summary["fork"]["turn"] == AT
    assert summary["usage"]["requests"] == BRANCHES * (TURNS - AT)
    scene.assert_whole(BRANCHES)


def test_a_killed_search_goes_on_with_the_same_command(scene: Scene, origin: Path) -> None:
    search = scene.place / "search"
    words = ("fork", str(origin), "one", "--bisect", "--samples", "1", "--out", str(search), "--json")
    command = scene.start(*words)
    until("the branch from turn 0 waits", lambda: count_waiting(scene)[1:] == [f"{TURNS - 2}\n"])
    command.kill()

    replace_file(scene.place / "go", b"100")
    command = scene.start(*words)

    assert command.wait() == 0, command
    report = command.document()
    assert report["result"] == "never-won" and [probe["turn"] for probe in report["probes"]] == [0, TURNS]
    assert len(lines(scene.place / "asked")) == 2 * TURNS


def count_waiting(scene: Scene) -> list[str]:
    return [line for line in lines(scene.place / "trace") if line == f"{TURNS - 2}\n"]
