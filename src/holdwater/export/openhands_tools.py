"""The tools of OpenHands' SDK: their actions as the SDK checks them, and their observations.

A call of one of these tools becomes an action of the tool's own kind if the SDK would accept its arguments.
The SDK adds two arguments to its tools, `security_risk` and `summary`, which belong to the event: a request
with them comes from the SDK. The events themselves are in `openhands_events.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from ..dialect.message import as_dict, as_string

EditorCommand = Literal["view", "create", "str_replace", "insert", "undo_edit"]
TaskCommand = Literal["view", "plan"]
Count = Annotated[int, Meta(ge=0)]
EVENT_ARGUMENTS = ("security_risk", "summary")  # arguments of every tool that are no fields of its action
NESTED_ARGUMENTS = ("view_range", "task_list")  # some models encode them as JSON in a string
ERROR_HEADER = "[An error occurred during execution.]\n"  # precedes the content of a failed observation


class ToolAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=""):
    """The arguments of a call, as the SDK keeps them."""


class FinishAction(ToolAction, frozen=True, tag="FinishAction"):
    message: str


class ThinkAction(ToolAction, frozen=True, tag="ThinkAction"):
    thought: str


class TerminalAction(ToolAction, frozen=True, tag="TerminalAction"):
    command: str
    is_input: bool = False
    timeout: Annotated[float, Meta(ge=0)] | None = None
    reset: bool = False


class FileEditorAction(ToolAction, frozen=True, tag="FileEditorAction"):
    command: EditorCommand
    path: str
    file_text: str | None = None
    old_str: str | None = None
    new_str: str | None = None
    insert_line: Count | None = None
    view_range: list[int] | None = None


class PlanningFileEditorAction(FileEditorAction, frozen=True, tag="PlanningFileEditorAction"):
    pass


class TaskItem(msgspec.Struct, frozen=True):
    title: str
    notes: str = ""
    status: Literal["todo", "in_progress", "done"] = "todo"


class TaskTrackerAction(ToolAction, frozen=True, tag="TaskTrackerAction"):
    command: TaskCommand = "view"
    task_list: list[TaskItem] = field(default_factory=list)


class ApplyPatchAction(ToolAction, frozen=True, tag="ApplyPatchAction"):
    patch: str


class ReadFileAction(ToolAction, frozen=True, tag="ReadFileAction"):
    file_path: str
    offset: Count | None = None
    limit: Annotated[int, Meta(ge=1)] | None = None


class WriteFileAction(ToolAction, frozen=True, tag="WriteFileAction"):
    file_path: str
    content: str


class EditAction(ToolAction, frozen=True, tag="EditAction"):
    file_path: str
    old_string: str
    new_string: str
    expected_replacements: Count = 1


class ListDirectoryAction(ToolAction, frozen=True, tag="ListDirectoryAction"):
    dir_path: str = "."
    recursive: bool = False


class GlobAction(ToolAction, frozen=True, tag="GlobAction"):
    pattern: str
    path: str | None = None


class GrepAction(ToolAction, frozen=True, tag="GrepAction"):
    pattern: str
    path: str | None = None
    include: str | None = None


TOOLS: dict[str, type[ToolAction]] = {
    "finish": FinishAction,
    "think": ThinkAction,
    "terminal": TerminalAction,
    "file_editor": FileEditorAction,
    "planning_file_editor": PlanningFileEditorAction,
    "task_tracker": TaskTrackerAction,
    "apply_patch": ApplyPatchAction,
    "read_file": ReadFileAction,
    "write_file": WriteFileAction,
    "edit": EditAction,
    "list_directory": ListDirectoryAction,
    "glob": GlobAction,
    "grep": GrepAction,
}
# Made at import: msgspec crashes when two threads make one at once.
_DECODERS = {name: msgspec.json.Decoder(kind, strict=False) for name, kind in TOOLS.items()}
# Names that models use for tools; the SDK takes the tool if it has none of that name.
ALIASES = {
    "bash": "terminal",
    "execute_bash": "terminal",
    "str_replace": "file_editor",
    "str_replace_editor": "file_editor",
}
# The lines that the terminal appends to the output of a command.
_TERMINAL_LINES = re.compile(
    r"(?:\n\[Current working directory: (?P<directory>[^\n]*)\])?"
    r"(?:\n\[Python interpreter: (?P<python>[^\n]*)\])?"
    r"(?:\n\[Command finished with exit code (?P<status>-?\d+)\])?\Z"
)
# The beginnings of results that the SDK's agent, not the tool, has written.
_AGENT_ERRORS = re.compile(r"Error (?:validating|executing) tool '|Tool '[^']*' not found\. Available: ")


def find_sdk_tools(definitions: Iterable[dict[str, Any]]) -> frozenset[str]:
    """Return the names of a request's tools if the SDK has defined them; otherwise none."""
    functions = [as_dict(definition.get("function")) for definition in definitions]
    properties = [as_dict(as_dict(function.get("parameters")).get("properties")) for function in functions]
    if not any(all(name in found for name in EVENT_ARGUMENTS) for found in properties):
        return frozenset()
    return frozenset(as_string(function.get("name")) for function in functions)


def parse_action(tool: str, arguments: Any) -> ToolAction | None:
    """Return the action of a call; None if the SDK's own tools include no such tool, or it refuses."""
    if tool not in TOOLS or not isinstance(arguments, dict):
        return None
    own = {name: value for name, value in arguments.items() if name not in EVENT_ARGUMENTS}
    own = {name: _decode_nested(name, value) for name, value in own.items() if value is not None}
    try:
        return _DECODERS[tool].decode(msgspec.json.encode(own))
    except msgspec.ValidationError:
        return None


def summarize_call(tool: str, arguments: dict[str, Any]) -> str:
    """Return the summary of a call: the model's own, or tool and arguments."""
    summary = arguments.get("summary")
    if isinstance(summary, str) and summary.strip():
        return summary
    own = {name: value for name, value in arguments.items() if name not in EVENT_ARGUMENTS}
    return f"{tool}: {json.dumps(own)}"


def is_agent_error(text: str) -> bool:
    """Return whether the result of a call is an error of the SDK's agent, and no observation."""
    return _AGENT_ERRORS.match(text) is not None


def make_observation(action: ToolAction, content: list[dict[str, Any]], failed: bool) -> dict[str, Any]:
    """Return the observation that the tool of this action makes of a result."""
    if content and content[0].get("text", "").startswith(ERROR_HEADER):
        failed = True
        text = content[0]["text"].removeprefix(ERROR_HEADER)
        content = [*([make_text(text)] if text else []), *content[1:]]
    fields = _list_fields(action, failed)
    if isinstance(action, TerminalAction) and content and "text" in content[-1]:
        text, metadata = _split_output(content[-1]["text"])
        content = [*content[:-1], make_text(text)]
        fields |= {"exit_code": metadata["exit_code"], "metadata": metadata}
    kind = str(type(action).__struct_config__.tag).removesuffix("Action") + "Observation"
    return {"kind": kind, "content": content, "is_error": failed, **fields}


def make_text(text: str) -> dict[str, Any]:
    """Return a part of a message."""
    return {"type": "text", "text": text}


def _split_output(text: str) -> tuple[str, dict[str, Any]]:
    """Return the output of a command, and the facts in the lines that the terminal has appended to it."""
    found = _TERMINAL_LINES.search(text)
    assert found is not None, "the pattern matches the empty end"
    metadata = {
        "exit_code": int(found["status"] or -1),
        "working_dir": found["directory"],
        "py_interpreter_path": found["python"],
    }
    return text[: found.start()], metadata


def _list_fields(action: ToolAction, failed: bool) -> dict[str, Any]:
    """Return the fields of the observation that repeat the action."""
    match action:
        case TerminalAction(command=command):
            return {"command": command}
        case FileEditorAction(command=command, path=path):
            return {"command": command} | (
                {} if failed else {"path": path, "prev_exist": command != "create"}
            )
        case TaskTrackerAction(command=command, task_list=tasks):
            return {"command": command, "task_list": tasks}
        case ReadFileAction(file_path=path) | WriteFileAction(file_path=path) | EditAction(file_path=path):
            return {"file_path": path}
        case ListDirectoryAction(dir_path=path):
            return {"dir_path": path}
        case GlobAction(pattern=pattern, path=place):
            return {"files": [], "pattern": pattern, "search_path": place or "."}
        case GrepAction(pattern=pattern, path=place):
            return {"matches": [], "pattern": pattern, "search_path": place or "."}
    return {}


def _decode_nested(name: str, value: Any) -> Any:
    """Return the list that a model has encoded as a string."""
    if name not in NESTED_ARGUMENTS or not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.MsgspecError:
        return value
