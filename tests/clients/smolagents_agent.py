"""A smolagents agent that calls tools on Chat Completions, streamed; `final_answer` ends it."""

import os
import sys
from pathlib import Path

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def note(text: str) -> str:
    """Write a line into the notes.

    Args:
        text: The line.
    """
    with Path("notes.txt").open("a") as notes:
        notes.write(text + "\n")
    return f"noted {text}"


model = OpenAIModel(
    model_id=os.environ["HOLDWATER_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = ToolCallingAgent(tools=[note], model=model, stream_outputs=True, verbosity_level=0)
sys.stdout.write(str(agent.run(sys.argv[1])))
