"""A loop over LiteLLM, streamed: the next request holds the message that LiteLLM builds from the chunks."""

import json
import os
import sys
from pathlib import Path

import litellm

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NOTE = {"type": "function", "function": {"name": "note", "description": "Notes a line.", "parameters": TEXT}}


def note(text: str) -> str:
    with Path("notes.txt").open("a") as notes:
        notes.write(text + "\n")
    return f"noted {text}"


messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    chunks = litellm.completion(
        model="openai/" + os.environ["HOLDWATER_MODEL"], messages=messages, tools=[NOTE], stream=True
    )
    said = litellm.stream_chunk_builder(list(chunks), messages=messages).choices[0].message
    messages.append(said.model_dump(exclude_unset=True))
    if not said.tool_calls:
        break
    for call in said.tool_calls:
        result = note(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
sys.stdout.write(said.content)
