"""Runs a conversation of the OpenHands SDK in the worker, with tools that act in the attempt's sandbox.

It imports the SDK, which takes seconds: `sdk_agent.py` imports it only in workers.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openhands.sdk import Tool, ToolDefinition, register_tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.task_tracker import TaskTrackerTool
from openhands.tools.terminal import TerminalTool

from .conversation import run_conversation
from .editor import EditorExecutor
from .terminal import TerminalExecutor
from .workspace import SandboxWorkspace, ToolSandbox

PREFIX = "holdwater_"  # of our tools in the SDK's registry; the model sees the SDK's own names


def converse(sandbox: Any, job: dict[str, Any], key: str, temporary: Path) -> dict[str, Any]:
    """Run the job's conversation; return what `run_conversation` returns. Raises the sandbox's error."""
    place = Path(tempfile.mkdtemp(dir=temporary))
    try:
        tools = ToolSandbox(sandbox, place / "mirror")
        names = [Tool(name=PREFIX + name) for name in job["tool_names"]]
        outcome = run_conversation(job, key, SandboxWorkspace(tools), names, [tools.check])
        if tools.failure is not None:
            raise tools.failure
        return outcome
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _find_sandbox(state: Any) -> ToolSandbox:
    workspace = state.workspace
    assert isinstance(workspace, SandboxWorkspace)
    return workspace.sandbox


def _make_terminal(state: Any) -> Sequence[ToolDefinition]:
    return TerminalTool.create(state, executor=TerminalExecutor(_find_sandbox(state)))


def _make_editor(state: Any) -> Sequence[ToolDefinition]:
    """Return the SDK's tool, whose description names the working directory, with our executor."""
    sandbox, made = _find_sandbox(state), []
    for tool in FileEditorTool.create(state):
        executor = EditorExecutor(sandbox, tool.executor.editor)
        description = sandbox.restore_paths(tool.description)
        made.append(tool.model_copy(update={"executor": executor, "description": description}))
    return made


def _make_tracker(state: Any) -> Sequence[ToolDefinition]:
    return TaskTrackerTool.create(state)  # its list is in memory: the conversation is kept nowhere


def _register(tool: type[ToolDefinition], make: Callable[[Any], Sequence[ToolDefinition]]) -> None:
    """Register a class that makes the tool: the registry takes classes alone."""

    def create(conv_state: Any) -> Sequence[ToolDefinition]:
        return make(conv_state)

    body = {"create": staticmethod(create), "name": tool.name}
    register_tool(PREFIX + tool.name, type(f"Sandbox{tool.__name__}", (tool,), body))


for _tool, _make in (
    (TerminalTool, _make_terminal),
    (FileEditorTool, _make_editor),
    (TaskTrackerTool, _make_tracker),
):
    _register(_tool, _make)
