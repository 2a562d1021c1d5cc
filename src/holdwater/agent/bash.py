"""The built-in agent: a loop over Chat Completions with one tool, `bash`, which runs in the sandbox.

The conversation lives in memory only while the agent acts; the gateway writes the permanent record.
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
LONGEST_COMMAND = 128 * 1024 - 1  # bytes; the limit of Linux for one argument
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


class BashArguments(msgspec.Struct, frozen=True):
    """The arguments of a tool call."""

    command: str


async def act(instance: Instance, sandbox: Sandbox, model: Model) -> str:
    """Let the model call `bash` until it replies without a call; return that reply's text as the answer."""
    system = SYSTEM.format(workdir=sandbox.workdir, seconds=COMMAND_SECONDS)
    messages: list[dict[str, Any]] = [  # grows by one turn at a time, at most MOST_TURNS turns
        {"role": "system", "content": system},
        {"role": "user", "content": instance.instruction},
    ]
    # The seed is the attempt's round: with it a model varies between attempts and repeats in a replay.
    seed = getattr(model, "seed", None)
    options = {"tools": [TOOL]} | ({} if seed is None else {"seed": seed})
    for _ in range(MOST_TURNS):
        message = _parse_message(await model.chat(messages, **options))
        messages.append(message)
        calls = message.get("tool_calls")
        if not calls:
            return str(message["content"] or "")
        for call in calls:
            content = await _answer_call(call, sandbox)
            messages.append({"role": "tool", "tool_call_id": str(call.get("id", "")), "content": content})
    raise LimitReached(f"not done after {MOST_TURNS} turns", kind="turns")


def bash() -> Agent:
    told = "holdwater's own small loop: a bash tool over Chat Completions"
    return Agent(name="bash", act=act, needs_model=True, description=told)


def _parse_message(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply's message, with only the keys that every provider accepts in a request."""
    try:
        message = reply["choices"][0]["message"]
        calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
        content = message.get("content")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ModelFailed("the model's reply contains no message", kind="reply") from None
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


async def _answer_call(call: Mapping[str, Any], sandbox: Sandbox) -> str:
    """Return the output of a tool call, or an error for a malformed one, so that the model can correct it."""
    function = call.get("function") or {}
    if function.get("name") != TOOL["function"]["name"]:
        return f"error: unknown tool: {str(function.get('name'))[:200]!r}; the only tool is `bash`"
    try:
        arguments = msgspec.json.decode(str(function.get("arguments", "")), type=BashArguments)
    except (msgspec.MsgspecError, RecursionError) as error:
        return f'error: arguments must be JSON like {{"command": "ls"}}: {error}'
    if "\0" in arguments.command or len(arguments.command.encode()) > LONGEST_COMMAND:
        return f"error: a command has at most {LONGEST_COMMAND} bytes and no NUL character"
    return _format_result(await sandbox.run(["bash", "-c", arguments.command], timeout=COMMAND_SECONDS))


def _format_result(result: CommandResult) -> str:
    if result.timed_out:
        status = f"stopped after {COMMAND_SECONDS:.0f} seconds"
    else:
        status = f"exit status: {result.exit_code}"
    return f"{status}\n{_shorten_output(result.output)}"


def _shorten_output(output: str) -> str:
    """Return the beginning and the end of the output, which show the start and the result of the command."""
    if len(output) <= LONGEST_OUTPUT:
        return output
    half = LONGEST_OUTPUT // 2
    return f"{output[:half]}\n[... {len(output) - 2 * half} characters left out ...]\n{output[-half:]}"
