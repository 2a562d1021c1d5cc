"""Runs one conversation of the OpenHands SDK to its end.

A worker imports this module; a sandbox runs it as a script: `python conversation.py JOB`. Therefore it
imports the SDK and the standard library alone.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openhands.sdk import LLM, Agent, Event, LocalConversation, Tool
from openhands.sdk.context.condenser import LLMSummarizingCondenser
from openhands.sdk.conversation import ConversationExecutionStatus, get_agent_final_response
from openhands.sdk.conversation.exceptions import ConversationRunError
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.sdk.workspace import LocalWorkspace
from pydantic import SecretStr

LONGEST_DETAIL = 2000  # characters of an error


def run_conversation(
    job: dict[str, Any],
    key: str,
    workspace: LocalWorkspace,
    tools: Sequence[Tool],
    callbacks: Sequence[Callable[[Event], None]] = (),
) -> dict[str, Any]:
    """Run the job's conversation; return its `status`, `answer`, and the `code` and `detail` of an error."""
    conversation = LocalConversation(
        agent=build_agent(job, key, tools),
        workspace=workspace,
        conversation_id=uuid.UUID(job["id"]),
        callbacks=list(callbacks),
        max_iteration_per_run=job["max_iterations"],
        stuck_detection=job["stuck_detection"],
        visualizer=None,
    )
    try:
        conversation.send_message(job["instruction"])
        try:
            conversation.run()
        except ConversationRunError as error:
            cause = error.original_exception
            return describe_end(conversation, "error", type(cause).__name__, str(cause))
        status = conversation.state.execution_status
        if status is ConversationExecutionStatus.ERROR:
            for event in reversed(conversation.state.events):
                if isinstance(event, ConversationErrorEvent):
                    return describe_end(conversation, "error", event.code, event.detail)
        return describe_end(conversation, status.value)
    finally:
        conversation.close()


def build_agent(job: dict[str, Any], key: str, tools: Sequence[Tool]) -> Agent:
    effort = {} if job["reasoning_effort"] is None else {"reasoning_effort": job["reasoning_effort"]}
    llm = LLM(
        model=f"openai/{job['model']}",
        base_url=job["url"],
        api_key=SecretStr(key),
        usage_id="agent",
        native_tool_calling=job["native_tool_calling"],
        **effort,
    )
    condenser = None
    if job["condenser"] == "llm":
        condenser = LLMSummarizingCondenser(
            llm=llm.model_copy(update={"usage_id": "condenser"}),
            max_size=job["condenser_size"],
            keep_first=job["condenser_keep"],
        )
    prompt = {} if job["prompt"] is None else {"system_prompt": job["prompt"]}
    return Agent(
        llm=llm, tools=list(tools), condenser=condenser, system_prompt_kwargs={"cli_mode": True}, **prompt
    )


def describe_end(
    conversation: LocalConversation, status: str, code: str = "", detail: str = ""
) -> dict[str, Any]:
    answer = get_agent_final_response(conversation.state.events)
    return {"status": status, "answer": answer, "code": code, "detail": detail[:LONGEST_DETAIL]}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    for name in job["tool_names"]:
        importlib.import_module(f"openhands.tools.{name}")  # which registers the tool
    tools = [Tool(name=name) for name in job["tool_names"]]
    workspace = LocalWorkspace(working_dir=str(Path.cwd()))
    outcome = run_conversation(job, os.environ["OPENAI_API_KEY"], workspace, tools)
    sys.stdout.write(f"\n{json.dumps(outcome)}\n")


if __name__ == "__main__":
    main()
