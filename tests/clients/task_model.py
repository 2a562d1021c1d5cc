"""The model behind tasksets, and behind their judges. It writes down every request.

Arguments: the file of requests; the file that holds replies back while it exists.
"""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

from holdwater.testing.scripted_model import ReplyFault, ScriptedReply, serve_script


class TaskModel:
    def __init__(self, trace: Path, gate: Path) -> None:
        self._trace = trace
        self._gate = gate
        self._count = 0

    def __call__(self, request: dict[str, Any]) -> ScriptedReply:
        text = str(request["messages"][-1]["content"])
        with self._trace.open("a") as trace:
            trace.write(json.dumps(text) + "\n")
        if self._gate.exists() and "Taste" in text:
            return ScriptedReply(fault=ReplyFault.STALL)
        self._count += 1
        if found := re.search(r"Reverse: (\w+)", text):
            return ScriptedReply(text=found[1][::-1])
        if "Taste" in text:
            return ScriptedReply(text="6")
        if text == "Note milk.":
            return ScriptedReply(tool_calls=[{"name": "ledger_note", "arguments": {"text": "milk"}}])
        if "Make a" in text:
            return ScriptedReply(tool_calls=[{"name": "bash", "arguments": {"command": "cp template work"}}])
        if "Hangman" in text:
            return ScriptedReply(text="[z]")
        if "C00" in text:  # the board of that game
            return ScriptedReply(text="[gear]")
        if "Write `yes`" in text:
            return ScriptedReply(
                tool_calls=[{"name": "bash", "arguments": {"command": "echo yes > answer.txt"}}]
            )
        if "more than once" in text:
            return ScriptedReply(text="a" * self._count)
        return ScriptedReply(text="yes" if "reference" in text.lower() else "blue")


async def main(trace: str, gate: str) -> None:
    async with serve_script(TaskModel(Path(trace), Path(gate))) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
