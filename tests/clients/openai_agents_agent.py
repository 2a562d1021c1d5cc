"""An agent of the OpenAI Agents SDK on Responses, streamed."""

import asyncio
import os
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def note(text: str) -> str:
    """Write a line into the notes."""
    with Path("notes.txt").open("a") as notes:
        notes.write(text + "\n")
    return f"noted {text}"


async def main() -> None:
    set_tracing_disabled(True)
    agent = Agent(name="clerk", model=os.environ["HOLDWATER_MODEL"], tools=[note])
    run = Runner.run_streamed(agent, sys.argv[1])
    async for _ in run.stream_events():
        pass
    sys.stdout.write(run.final_output)


asyncio.run(main())
