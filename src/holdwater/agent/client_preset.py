"""Runs a well-known command-line agent headless in a sandbox with our model, on top of `command.py`.

A preset is data: the command, its variables, and how to find the final answer in its output. `presets.py`
has the presets.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from ..core.authoring import Agent, Model, Sandbox
from ..core.errors import AgentFailed, BadInput
from ..core.records import Instance
from . import command

# Uses the file in its first argument as standard input, removes the file, and executes the other arguments.
STDIN_FROM_FILE = 'exec <"$1" && rm -f "$1"; rmdir "${1%/*}" 2>/dev/null; shift; exec "$@"'
VERSION_SECONDS = 60.0
ARGUMENT_HINT = "shorten the instruction, or use an agent that reads it from its standard input"

log = logging.getLogger(__name__)


class ModelEndpoint(NamedTuple):
    """The model's address, as seen by a client in the sandbox."""

    model: str
    side_model: str  # for calls beside the conversation
    url: str  # ends in `/v1`
    root: str  # without `/v1`
    key: str


class AgentPreset(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a client. It reads its instruction from standard input, or as its last argument."""

    name: str
    title: str
    program: str
    install: str  # the install command for the newest tested version
    tested: tuple[str, str]  # the oldest and the newest tested version
    dialect: str
    memory: int  # bytes in its sandbox, measured by `benchmarks/preset_memory.py`
    words: Callable[[ModelEndpoint], list[str]]
    environment: Callable[[ModelEndpoint], dict[str, str]]
    answer: Callable[[str], str | None] = lambda printed: None  # extracts the answer; None: the whole output
    instruction: str = ""  # prefix of an instruction that is passed as an argument
    prelude: str = ""  # shell lines that run first, if the instruction is on standard input
    version: str = "--version"  # the argument that prints the version
    mark: str = ""  # text before the version, if other numbers come first

    @property
    def versions(self) -> str:
        return describe_range(self.tested)

    @property
    def description(self) -> str:
        return f"{self.title}, using the {self.dialect} dialect; tested: {self.versions}; `{self.install}`"


def make_agent(made: AgentPreset, extra: str = "") -> Agent:
    """Return the agent that runs this client, with `extra` arguments at the end of its command line."""
    try:
        added = shlex.split(extra)
    except ValueError as error:
        raise BadInput(f"cannot read the agent's arguments: {error}: `{extra}`") from None
    version = _ClientVersion(made)

    async def act(instance: Instance, sandbox: Sandbox, model: Model) -> str:
        url = model.sandbox_url
        door = ModelEndpoint(model.name, model.side_name, url, url.removesuffix("/v1"), model.key)
        words = [made.program, *made.words(door), *added]
        if made.instruction:
            words.append(command.check_argument(made.instruction + instance.instruction, ARGUMENT_HINT))
        else:
            file = command.instruction_file(sandbox)
            await sandbox.write(file, instance.instruction)
            words = ["sh", "-c", f"{made.prelude}\n{STDIN_FROM_FILE}", "sh", file, *words]
        environment = made.environment(door)
        untested = await version.describe_untested(sandbox, environment)
        try:
            result = await command.run_program(made.program, words, sandbox, environment, made.install)
        except AgentFailed as error:
            raise AgentFailed(error.message, error.hint or untested, kind=error.kind) from None
        answer = made.answer(result.stdout)
        return result.stdout if answer is None else answer

    return Agent(
        name=f"{made.name} {extra}".strip(),
        act=act,
        needs_model=True,
        check=lambda: command.check_program(made.program, made.install),
        description=made.description,
        paths=command.find_paths(made.program, *added),
        memory=made.memory,
    )


class _ClientVersion:
    """The version of a client, queried once per process."""

    def __init__(self, made: AgentPreset) -> None:
        self._preset = made
        self._warning: str | None = None

    async def describe_untested(self, sandbox: Sandbox, environment: Mapping[str, str]) -> str:
        """Return a warning if the client's version is not a tested one."""
        if self._warning is None:
            self._warning = ""  # other attempts do not wait for the query
            self._warning = await self._ask_version(sandbox, environment)
        return self._warning

    async def _ask_version(self, sandbox: Sandbox, environment: Mapping[str, str]) -> str:
        made = self._preset
        words = ["sh", "-c", '"$@" 2>&1', "sh", made.program, made.version]
        said = await sandbox.run(words, env=environment, timeout=VERSION_SECONDS)
        printed = said.stdout.rpartition(made.mark)[2] if made.mark else said.stdout
        told = explain_version(made.program, made.tested, printed) if said.ok else ""
        if told:
            log.warning("agent.untested %s", told)
        return told


def explain_version(name: str, tested: tuple[str, str], said: str) -> str:
    """Return a warning about the version; an empty string if it is a tested one."""
    found = re.search(r"\d{1,9}(\.\d{1,9})+", said)
    oldest, newest = map(_parse_version, tested)
    if found is not None and oldest <= _parse_version(found[0]) <= newest:
        return ""
    version = found[0] if found else "unknown"
    return f"`{name}` has version {version}; tested versions: {describe_range(tested)}"


def describe_range(tested: tuple[str, str]) -> str:
    return " to ".join(dict.fromkeys(tested))


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
