"""A Pydantic AI agent, streamed: on Chat Completions, Messages or Gemini, as its first argument says."""

import asyncio
import os
import sys
from pathlib import Path

from pydantic_ai import Agent

DIALECTS = {"chat": "openai-chat", "messages": "anthropic", "gemini": "google"}


async def main(dialect: str, instruction: str) -> None:
    agent = Agent(f"{DIALECTS[dialect]}:{os.environ['HOLDWATER_MODEL']}")

    @agent.tool_plain
    def note(text: str) -> str:
        """Write a line into the notes."""
        with Path("notes.txt").open("a") as notes:
            notes.write(text + "\n")
        return f"noted {text}"

    async def listen(_, events) -> None:
        async for _ in events:
            pass

    result = await agent.run(instruction, event_stream_handler=listen)
    sys.stdout.write(result.output)


asyncio.run(main(*sys.argv[1:]))
