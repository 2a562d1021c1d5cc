"""The model behind the clients: three notes by a tool, then the end. It writes down every request.

Arguments: the name of the client, the file of requests, the file that holds the third reply back.
"""

import asyncio
import json
import re
import secrets
import sys
from pathlib import Path
from typing import Any

from holdwater.testing.scripted_model import ReplyFault, ScriptedReply, serve_script

TURNS = 4
NOTE = re.compile(r"note-(\d)-[0-9a-f]{8}")


def call_note(text: str) -> dict[str, Any]:
    return {"name": "note", "arguments": {"text": text}}


def call_shell(text: str) -> dict[str, Any]:
    arguments = {"command": f"echo {text} >>notes.txt", "is_background": False}
    return {"name": "run_shell_command", "arguments": arguments}


def call_commands(text: str) -> dict[str, Any]:
    return {"name": "run_commands", "arguments": {"commands": [f"echo {text} >>notes.txt"]}}


def call_terminal(text: str) -> dict[str, Any]:
    return {"name": "terminal", "arguments": {"command": f"echo {text} >>notes.txt"}}


TOOLS = {"openhands-worker": call_terminal, "qwen-code": call_shell, "cline": call_commands}
ENDS = {
    "smolagents": {"name": "final_answer", "arguments": {"answer": "done"}},
    "openhands-sdk": {"name": "finish", "arguments": {"message": "done"}},
    "openhands-worker": {"name": "finish", "arguments": {"message": "done"}},
}


class CountingModel:
    def __init__(self, client: str, trace: Path, gate: Path) -> None:
        self._client = client
        self._trace = trace
        self._gate = gate

    def __call__(self, request: dict[str, Any]) -> ScriptedReply:
        """The reply to a turn is never the same twice: a turn that is paid again leads elsewhere."""
        turn = max((int(n) for n in NOTE.findall(json.dumps(request))), default=0) + 1
        kind = f"turn {turn}" if request.get("tools") else "side"
        with self._trace.open("a") as trace:
            trace.write(kind + "\n")
        if kind == "side":
            return ScriptedReply(text="a title")
        if turn == TURNS:
            end = ENDS.get(self._client)
            return ScriptedReply(tool_calls=[end]) if end else ScriptedReply(text="done")
        if turn == TURNS - 1 and self._gate.exists():
            return ScriptedReply(fault=ReplyFault.STALL)
        text = f"note-{turn}-{secrets.token_hex(4)}"
        call = TOOLS.get(self._client, call_note)(text)
        return ScriptedReply(tool_calls=[{**call, "id": f"call_{secrets.token_hex(8)}"}], cached=turn)


async def main() -> None:
    client, trace, gate = sys.argv[1:]
    async with serve_script(CountingModel(client, Path(trace), Path(gate))) as url:
        sys.stdout.write(url + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
