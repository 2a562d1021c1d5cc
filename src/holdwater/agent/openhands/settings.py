"""The options of the agent `openhands-sdk`, from `--agent-option`: parsed and checked before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from ...core.errors import BadInput
from ...core.records import Record
from ...plugin import find_close_name

# Tools that act on the sandbox from a worker, and tools that the SDK has where the agent runs itself.
WORKER_TOOLS = ("terminal", "file_editor", "task_tracker")
SANDBOX_TOOLS = (*WORKER_TOOLS, "glob", "grep", "apply_patch")

Count = Annotated[int, msgspec.Meta(ge=1)]


class SdkSettings(Record, frozen=True):
    """How a conversation runs. `conversation.py` receives these fields as JSON."""

    max_iterations: Count = 500
    condenser: Literal["llm", "none"] = "llm"
    condenser_size: Count = 80  # events after which it summarizes
    condenser_keep: Annotated[int, msgspec.Meta(ge=0)] = 4  # events at the beginning that it leaves
    system_prompt: str | None = None  # a file, whose text replaces the SDK's own prompt
    tools: str = ",".join(WORKER_TOOLS)
    stuck_detection: bool = True
    native_tool_calling: bool = True
    reasoning_effort: str | None = None
    python: str | None = None  # an interpreter with the SDK: the agent runs in the sandbox

    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(filter(None, (name.strip() for name in self.tools.split(","))))


def parse_settings(options: Mapping[str, Any]) -> SdkSettings:
    """Return the settings; raise BadInput that names the invalid option. Paths become absolute."""
    hints = get_type_hints(SdkSettings, include_extras=True)
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if name not in hints:
            near = find_close_name(name, hints)
            known = ", ".join(f"`{field}`" for field in hints)
            hint = f"did you mean `{near}`?" if near else f"it has {known}"
            raise BadInput(f"unknown option of agent `openhands-sdk`: `{name}`", hint)
        try:
            fields[name] = msgspec.convert(value, hints[name])
        except msgspec.ValidationError as error:
            text = str(error).replace(" | null", "")
            raise _make_error(name, value, text[0].lower() + text[1:]) from None
    settings = SdkSettings(**fields)
    _check_condenser(settings)
    _check_tools(settings)
    absolute = {name: str(Path(fields[name]).absolute()) for name in ("system_prompt",) if fields.get(name)}
    if settings.python and "/" in settings.python:  # a plain name is looked up on PATH
        absolute["python"] = str(Path(settings.python).absolute())
    return msgspec.structs.replace(settings, **absolute)


def read_system_prompt(settings: SdkSettings) -> str | None:
    """Return the text of the prompt's file."""
    if settings.system_prompt is None:
        return None
    try:
        text = Path(settings.system_prompt).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _make_error("system_prompt", settings.system_prompt, reason) from None
    if not text.strip():
        raise _make_error("system_prompt", settings.system_prompt, "the file is empty")
    return text


def _check_condenser(settings: SdkSettings) -> None:
    if settings.condenser_keep >= settings.condenser_size // 2 - 1:
        reason = f"expected less than half of `condenser_size`, {settings.condenser_size}, minus 1"
        raise _make_error("condenser_keep", settings.condenser_keep, reason)


def _check_tools(settings: SdkSettings) -> None:
    there = WORKER_TOOLS if settings.python is None else SANDBOX_TOOLS
    for name in settings.tool_names:
        if name not in there:
            known = ", ".join(f"`{tool}`" for tool in there)
            hint = f"with `--agent-option python=PATH` it runs in the sandbox, and has `{name}`"
            hint = hint if name in SANDBOX_TOOLS else ""
            raise _make_error("tools", name, f"expected some of {known}", hint)
    if not settings.tool_names:
        raise _make_error("tools", settings.tools, "no tool")


def _make_error(name: str, value: object, reason: str, hint: str = "") -> BadInput:
    return BadInput(f"`--agent-option {name}`: {reason}: `{value}`", hint)
