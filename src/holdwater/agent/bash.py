"""Our own small agent: a loop over Chat Completions with one tool, `bash`, that runs in the sandbox.

It keeps its conversation for as long as it acts; what is kept for good is written by the gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..core.authoring import Agent, Model, Sandbox
from ..core.errors import LimitReached, ModelFailed
from ..core.records import CommandResult, Instance

MOST_TURNS = 50
COMMAND_SECONDS = 60.0
LONGEST_COMMAND = 128 * 1024 - 1  # bytes that Linux takes in one argument
LONGEST_OUTPUT = 16 * 1024  # characters of a command's output that the model sees

SYSTEM = """\
You are a careful software engineer working in a sandbox, in the directory {workdir}.
Use the `bash` tool to look around, to change files and to check what you did. Each call is a new shell
that starts in that directory and is stopped after {seconds:.0f} seconds; nothing can be typed into it.
Read before you edit, make the smallest change that solves the task, and run something that shows that it
does. When you are done, answer without a tool call and say in a sentence or two what you did."""

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command in the sandbox; gives its exit status and its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command to run."}},
            "required": ["command"],
        },
    },
}


class Arguments(msgspec.Struct, frozen=True):
    """What the model gives the tool."""

    command: str


async def act(instance: Instance, sandbox: Sandbox, model: Model) -> str:
    """Let the model call `bash` until it answers without a call; its last words are the answer."""
    system = SYSTEM.format(workdir=sandbox.workdir, seconds=COMMAND_SECONDS)
    messages: list[dict[str, Any]] = [  # grows by a turn at a time, at most MOST_TURNS
        {"role": "system", "content": system},
        {"role": "user", "content": instance.instruction},
    ]
    # The attempt's round: a model that honours it samples anew in another attempt, and the same in a replay.
    seed = getattr(model, "seed", None)
    options = {"tools": [TOOL]} | ({} if seed is None else {"seed": seed})
    for _ in range(MOST_TURNS):
        message = _message(await model.chat(messages, **options))
        messages.append(message)
        calls = message.get("tool_calls")
        if not calls:
            return str(message["content"] or "")
        for call in calls:
            content = await _answer(call, sandbox)
            messages.append({"role": "tool", "tool_call_id": str(call.get("id", "")), "content": content})
    raise LimitReached(f"not done after {MOST_TURNS} turns", kind="turns")


def bash() -> Agent:
    told = "holdwater's own small loop: a bash tool over Chat Completions"
    return Agent(name="bash", act=act, needs_model=True, description=told)


def _message(reply: Mapping[str, Any]) -> dict[str, Any]:
    """The reply's message with the keys that every provider takes back."""
    try:
        message = reply["choices"][0]["message"]
        calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
        content = message.get("content")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ModelFailed("the model's reply holds no message", kind="reply") from None
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


async def _answer(call: Mapping[str, Any], sandbox: Sandbox) -> str:
    """What the tool says; a malformed call is the model's to correct."""
    function = call.get("function") or {}
    if function.get("name") != TOOL["function"]["name"]:
        return f"error: unknown tool: {str(function.get('name'))[:200]!r}; the only tool is `bash`"
    try:
        arguments = msgspec.json.decode(str(function.get("arguments", "")), type=Arguments)
    except (msgspec.MsgspecError, RecursionError) as error:
        return f'error: arguments must be JSON like {{"command": "ls"}}: {error}'
    if "\0" in arguments.command or len(arguments.command.encode()) > LONGEST_COMMAND:
        return f"error: a command has at most {LONGEST_COMMAND} bytes and no NUL character"
    return _told(await sandbox.run(["bash", "-c", arguments.command], timeout=COMMAND_SECONDS))


def _told(result: CommandResult) -> str:
    if result.timed_out:
        status = f"stopped after {COMMAND_SECONDS:.0f} seconds"
    else:
        status = f"exit status: {result.exit_code}"
    return f"{status}\n{_cut(result.output)}"


def _cut(output: str) -> str:
    """The beginning and the end: what was run, and how it ended."""
    if len(output) <= LONGEST_OUTPUT:
        return output
    half = LONGEST_OUTPUT // 2
    return f"{output[:half]}\n[... {len(output) - 2 * half} characters left out ...]\n{output[-half:]}"
