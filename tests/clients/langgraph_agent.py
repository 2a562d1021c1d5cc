"""A LangGraph agent on Chat Completions, streamed. It has one tool and answers when the model calls none."""

import os
import sys
from pathlib import Path

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def note(text: str) -> str:
    """Write a line into the notes."""
    with Path("notes.txt").open("a") as notes:
        notes.write(text + "\n")
    return f"noted {text}"


model = ChatOpenAI(model=os.environ["HOLDWATER_MODEL"], streaming=True)
agent = create_react_agent(model, [note])
for state in agent.stream({"messages": [("user", sys.argv[1])]}, stream_mode="values"):
    last = state["messages"][-1]
sys.stdout.write(last.content)
