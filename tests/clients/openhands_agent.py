"""An agent of the OpenHands SDK, which chooses Responses for this model, with a tool beside `finish`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from openhands.sdk import (
    LLM,
    Action,
    Agent,
    Conversation,
    Observation,
    TextContent,
    Tool,
    ToolDefinition,
    register_tool,
)
from openhands.sdk.tool import ToolExecutor
from pydantic import Field, SecretStr


class NoteAction(Action):
    text: str = Field(description="The line.")


class NoteObservation(Observation):
    @property
    def to_llm_content(self) -> Sequence[TextContent]:
        return [TextContent(text="noted")]


class NoteExecutor(ToolExecutor):
    def __call__(self, action: NoteAction, conversation=None) -> NoteObservation:
        with Path("notes.txt").open("a") as notes:
            notes.write(action.text + "\n")
        return NoteObservation()


class NoteTool(ToolDefinition[NoteAction, NoteObservation]):
    @classmethod
    def create(cls, conv_state=None, **_) -> Sequence["NoteTool"]:
        return [
            cls(
                description="Write a line into the notes.",
                action_type=NoteAction,
                observation_type=NoteObservation,
                executor=NoteExecutor(),
            )
        ]


register_tool("NoteTool", NoteTool)
llm = LLM(
    model="openai/" + os.environ["HOLDWATER_MODEL"],
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=SecretStr(os.environ["OPENAI_API_KEY"]),
    usage_id="agent",
)
conversation = Conversation(
    agent=Agent(llm=llm, tools=[Tool(name="NoteTool")]), workspace=str(Path.cwd()), visualizer=None
)
conversation.send_message(sys.argv[1])
conversation.run()
