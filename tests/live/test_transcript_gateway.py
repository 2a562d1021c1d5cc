"""What the gateway records, plain or streamed, in any dialect, reads back as the same turn."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gateway_scene import MODEL, scene
from tests.ledger_scene import new_run
from tests.speech import DIALECTS, send, speak

from holdwater.ledger.exchanges import AttemptLog
from holdwater.ledger.message import Message, ToolCall
from holdwater.ledger.trajectory import Tree, turns
from holdwater.testing.scripted import Reply, serve

LS = ToolCall(name="bash", arguments={"command": "ls"}, id="call_1")
ANSWER = Reply(
    text="I look.",
    reasoning="Look first.",
    tool_calls=[{"name": "bash", "arguments": {"command": "ls"}, "id": "call_1"}],
)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_recorded_call_is_a_turn(tmp_path: Path, dialect: str, stream: bool) -> None:
    directory = new_run(tmp_path)
    log = AttemptLog(directory, 1)
    async with (
        serve(lambda request: ANSWER) as upstream,
        scene(upstream, log=log) as s,  # type: ignore[arg-type]
        send(s, speak(dialect, "hi", stream=stream)) as response,
    ):
        await response.read()
    log.close()

    [turn] = turns(Tree(directory, 1))

    assert turn.reply == Message(role="assistant", parts=("I look.",), reasoning="Look first.", calls=(LS,))
    assert turn.new == (Message(role="user", parts=("hi",)),)
    assert (turn.dialect, turn.streamed, turn.model, turn.error) == (dialect, stream, MODEL, "")
    assert turn.finish and turn.usage.output_tokens
