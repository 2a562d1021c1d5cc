"""What the gateway records, plain or streamed, in any dialect, reads back as the same turn."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dialect_requests import DIALECTS, send, speak
from tests.gateway_harness import MODEL, scene
from tests.ledger_runs import new_run

from holdwater.conversation.trajectory import ExchangeTree, read_turns
from holdwater.dialect.message import CommonMessage, ToolCall
from holdwater.ledger.exchanges import AttemptLog
from holdwater.testing.scripted_model import ScriptedReply, serve_script

LS = ToolCall(name="bash", arguments={"command": "ls"}, id="call_1")
ANSWER = ScriptedReply(
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
        serve_script(lambda request: ANSWER) as upstream,
        scene(upstream, log=log) as s,  # type: ignore[arg-type]
        send(s, speak(dialect, "hi", stream=stream)) as response,
    ):
        await response.read()
    log.close()

    [turn] = read_turns(ExchangeTree(directory, 1))

    assert turn.reply == CommonMessage(
        role="assistant", parts=("I look.",), reasoning="Look first.", calls=(LS,)
    )
    assert turn.new == (CommonMessage(role="user", parts=("hi",)),)
    assert (turn.dialect, turn.streamed, turn.model, turn.error) == (dialect, stream, MODEL, "")
    assert turn.finish and turn.usage.output_tokens
