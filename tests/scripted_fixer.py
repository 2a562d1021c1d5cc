"""A model that mends the calculator of `swebench_rows.py` with the tools of a real client. Prints its URL.

It calls the client's shell tool once and then says that it is done, in whatever dialect it is asked.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

from holdwater.testing.scripted_model import ScriptedReply, serve_raw

MEND = "sed -i 's#n // 2#n / 2#' calc.py && python3 -c 'import calc; print(calc.halve(3))'"
HAND_IN = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; git diff"
RETURNED = ('"tool_result"', '"role":"tool"', '"role": "tool"', '"function_call_output"')


def of_claude(headers: Mapping[str, str], body: bytes) -> ScriptedReply:
    text = body.decode()
    if '"name":"Bash"' not in text.replace(": ", ":"):
        return ScriptedReply(text="mend the calculator")  # a side call, without tools
    if any(mark in text for mark in RETURNED):
        return ScriptedReply(text="`halve` divides exactly now.")
    return _call("Bash", {"command": MEND, "description": "mend it"})


def of_mini(headers: Mapping[str, str], body: bytes) -> ScriptedReply:
    done = any(mark in body.decode() for mark in RETURNED)
    return _call("bash", {"command": HAND_IN if done else MEND})


def _call(name: str, arguments: dict[str, str]) -> ScriptedReply:
    return ScriptedReply(text="let me", tool_calls=[{"name": name, "arguments": arguments}])


SCRIPTS = {"claude-code": of_claude, "mini-swe-agent": of_mini}


async def main(client: str) -> None:
    async with serve_raw(SCRIPTS[client]) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
