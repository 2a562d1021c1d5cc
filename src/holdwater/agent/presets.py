"""Well-known command-line agents, each with what it needs to run headless in a sandbox with our model.

A preset is data: what is run, with which variables, where its last words are. Running it is one function for
all of them, on top of `command.py`.
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

# Reads the file that is its first word, removes every trace of it, and becomes the rest of its words.
FROM_FILE = 'exec <"$1" && rm -f "$1"; rmdir "${1%/*}" 2>/dev/null; shift; exec "$@"'
# Without a chosen way to log in, a base URL makes it choose one that it then refuses.
GEMINI_SETTINGS = """
mkdir -p ~/.gemini
[ -e ~/.gemini/settings.json ] || cat >~/.gemini/settings.json <<END
{
  "security": {"auth": {"selectedType": "gemini-api-key"}},
  "general": {"enableAutoUpdate": false},
  "privacy": {"usageStatisticsEnabled": false}
}
END
"""
VERSION_SECONDS = 60.0
HINT = "shorten the instruction, or use an agent that reads it from its standard input"

log = logging.getLogger(__name__)


class Door(NamedTuple):
    """Where the model is, as a client in the sandbox is told."""

    model: str
    url: str  # ends in `/v1`
    root: str  # without it
    key: str


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """How a client is run. It gets its instruction by standard input, or as its last word."""

    name: str
    title: str
    program: str
    install: str  # the command, for the newest version that was tested
    tested: tuple[str, str]  # the oldest and the newest
    dialect: str
    words: Callable[[Door], list[str]]
    environment: Callable[[Door], dict[str, str]]
    answer: Callable[[str], str | None] = lambda printed: None  # None: all that it printed
    instruction: str = ""  # what stands before an instruction that is an argument
    first: str = ""  # lines of shell that come first, where it reads its standard input
    version: str = "--version"  # what makes it say its version

    @property
    def versions(self) -> str:
        return " to ".join(dict.fromkeys(self.tested))

    @property
    def description(self) -> str:
        return f"{self.title}, which speaks {self.dialect}; tested: {self.versions}; `{self.install}`"


def preset(name: str, extra: str = "") -> Agent:
    """The agent that runs this client, with `extra` words at the end of its command line."""
    made = PRESETS[name]
    try:
        added = shlex.split(extra)
    except ValueError as error:
        raise BadInput(f"cannot read the agent's arguments: {error}: `{extra}`") from None
    version = _Version(made)

    async def act(instance: Instance, sandbox: Sandbox, model: Model) -> str:
        door = Door(model.name, model.sandbox_url, model.sandbox_url.removesuffix("/v1"), model.key)
        words = [made.program, *made.words(door), *added]
        if made.instruction:
            words.append(command.argument(made.instruction + instance.instruction, HINT))
        else:
            file = command.instruction_file(sandbox)
            await sandbox.write(file, instance.instruction)
            words = ["sh", "-c", f"{made.first}\n{FROM_FILE}", "sh", file, *words]
        environment = made.environment(door)
        untested = await version.untested(sandbox, environment)
        try:
            result = await command.run(made.program, words, sandbox, environment, made.install)
        except AgentFailed as error:
            raise AgentFailed(error.message, error.hint or untested, kind=error.kind) from None
        answer = made.answer(result.stdout)
        return result.stdout if answer is None else answer

    return Agent(
        name=f"{name} {extra}".strip(),
        act=act,
        needs_model=True,
        check=lambda: command.look_for(made.program, made.install),
        description=made.description,
        paths=command.find_paths(made.program, *added),
    )


class _Version:
    """What version of a client this is; asked once in a process."""

    def __init__(self, made: Preset) -> None:
        self._preset = made
        self._told: str | None = None

    async def untested(self, sandbox: Sandbox, environment: Mapping[str, str]) -> str:
        """A sentence where the version is not among those that were tested."""
        if self._told is None:
            self._told = ""  # meanwhile nobody waits for it
            self._told = await self._ask(sandbox, environment)
        return self._told

    async def _ask(self, sandbox: Sandbox, environment: Mapping[str, str]) -> str:
        made = self._preset
        words = ["sh", "-c", '"$@" 2>&1', "sh", made.program, made.version]
        said = await sandbox.run(words, env=environment, timeout=VERSION_SECONDS)
        told = outside(made, said.stdout) if said.ok else ""
        if told:
            log.warning("agent.untested %s", told)
        return told


def outside(made: Preset, said: str) -> str:
    """What there is to say of a version; nothing where it was tested."""
    found = re.search(r"\d{1,9}(\.\d{1,9})+", said)
    if found is not None and _number(made.tested[0]) <= _number(found[0]) <= _number(made.tested[1]):
        return ""
    version = found[0] if found else "unknown"
    return f"`{made.program}` has version {version}, tested are {made.versions}"


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _last(printed: str, told: Callable[[dict[str, object]], object]) -> str | None:
    """What `told` finds in the last line of JSON in which it finds anything."""
    for line in reversed(printed.splitlines()):
        try:
            found = told(msgspec.json.decode(line, type=dict[str, object]))
        except (msgspec.MsgspecError, RecursionError):
            continue  # not JSON: something else that was printed
        if isinstance(found, str):
            return found
    return None


def _of_claude(printed: str) -> str | None:
    return _last(printed, lambda event: event.get("result"))


def _of_codex(printed: str) -> str | None:
    def told(event: dict[str, object]) -> object:
        item = event.get("item")
        said = isinstance(item, dict) and item.get("type") == "agent_message"
        return item.get("text") if isinstance(item, dict) and said else None

    return _last(printed, told)


def _of_opencode(printed: str) -> str | None:
    def told(event: dict[str, object]) -> object:
        part = event.get("part")
        return part.get("text") if isinstance(part, dict) and event.get("type") == "text" else None

    return _last(printed, told)


def _of_gemini(printed: str) -> str | None:
    """One document in many lines, after whatever else was printed."""
    try:
        found = msgspec.json.decode(printed[printed.index("\n{\n") if printed[:1] != "{" else 0 :])
    except (ValueError, RecursionError):
        return None
    said = found.get("response") if isinstance(found, dict) else None
    return said if isinstance(said, str) else None


def _of_mini(printed: str) -> str | None:
    """What it hands in, which stands at the end of what it prints."""
    _, found, rest = printed.rpartition("\nExit:\n")
    return rest.partition("\nSaved trajectory to")[0].strip() if found else None


def _quoted(text: str) -> str:
    """As a string of TOML, which takes those of JSON."""
    return msgspec.json.encode(text).decode()


def _opencode_config(door: Door) -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "holdwater",
        "options": {"baseURL": door.url, "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {door.model: {"name": door.model}},
    }
    model = f"holdwater/{door.model}"
    config = {
        "model": model,
        "small_model": model,
        "provider": {"holdwater": provider},
        "permission": "allow",
        "share": "disabled",
        "autoupdate": False,
    }
    return msgspec.json.encode(config).decode()


CLAUDE_CODE = Preset(
    name="claude-code",
    title="Claude Code",
    program="claude",
    install="npm install -g @anthropic-ai/claude-code@2.1.325",
    tested=("2.1.248", "2.1.325"),
    dialect="messages",
    words=lambda door: [
        "--print",
        "--dangerously-skip-permissions",
        "--output-format=json",
        f"--model={door.model}",
    ],
    environment=lambda door: {
        "ANTHROPIC_BASE_URL": door.root,
        "ANTHROPIC_AUTH_TOKEN": door.key,
        "ANTHROPIC_SMALL_FAST_MODEL": door.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": door.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": door.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",  # root may skip permissions only where it is told that this is one
    },
    answer=_of_claude,
)

CODEX = Preset(
    name="codex",
    title="Codex",
    program="codex",
    install="npm install -g @openai/codex@0.166.0",
    tested=("0.155.0", "0.166.0"),
    dialect="responses",
    # A provider of our own: the built-in one tries WebSockets first.
    words=lambda door: [
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "--json",
        f"--model={door.model}",
        "--config=analytics.enabled=false",
        "--config=features.plugins=false",  # it would look for some where no network is, and wait
        "--config=model_provider=holdwater",
        "--config=model_providers.holdwater.name=holdwater",
        f"--config=model_providers.holdwater.base_url={_quoted(door.url)}",
        "--config=model_providers.holdwater.env_key=OPENAI_API_KEY",
        "--config=model_providers.holdwater.wire_api=responses",
        "-",
    ],
    environment=lambda door: {"OPENAI_API_KEY": door.key},
    answer=_of_codex,
)

OPENCODE = Preset(
    name="opencode",
    title="opencode",
    program="opencode",
    install="npm install -g opencode-ai@1.18.33",
    tested=("1.18.26", "1.18.33"),
    dialect="chat",
    words=lambda door: ["run", "--format=json", f"--model=holdwater/{door.model}"],
    environment=lambda door: {
        "OPENAI_API_KEY": door.key,
        "OPENCODE_CONFIG_CONTENT": _opencode_config(door),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    },
    answer=_of_opencode,
)

GEMINI_CLI = Preset(
    name="gemini-cli",
    title="Gemini CLI",
    program="gemini",
    install="npm install -g @google/gemini-cli@0.61.0",
    tested=("0.58.0", "0.61.0"),
    dialect="gemini",
    words=lambda door: ["--yolo", "--output-format=json", f"--model={door.model}"],
    environment=lambda door: {
        "GOOGLE_GEMINI_BASE_URL": door.root,
        "GEMINI_API_KEY": door.key,
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
        "GEMINI_CLI_NO_RELAUNCH": "true",  # with more memory, in a process below the first
    },
    first=GEMINI_SETTINGS,
    answer=_of_gemini,
)

AIDER = Preset(
    name="aider",
    title="aider",
    program="aider",
    install="uv tool install aider-chat==0.86.2",
    tested=("0.86.0", "0.86.2"),
    dialect="chat",
    words=lambda door: [
        f"--model=openai/{door.model}",
        "--message-file=/dev/stdin",
        "--yes-always",
        "--no-auto-commits",
        "--no-dirty-commits",
        "--chat-history-file=/dev/null",
        "--input-history-file=/dev/null",
        "--no-check-update",
        "--no-show-release-notes",
        "--no-show-model-warnings",
        "--no-analytics",
        "--no-pretty",
        "--no-fancy-input",
        "--no-gitignore",
        "--no-detect-urls",
    ],
    environment=lambda door: {
        "OPENAI_API_BASE": door.url,
        "OPENAI_API_KEY": door.key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    first="git rev-parse --git-dir >/dev/null 2>&1 || export AIDER_GIT=false",  # it would make a repository
)

MINI_SWE_AGENT = Preset(
    name="mini-swe-agent",
    title="mini-swe-agent",
    program="mini",
    install="uv tool install mini-swe-agent==2.4.6 -w mcp",
    tested=("2.3.1", "2.4.6"),
    dialect="chat",
    words=lambda door: [f"--model=openai/{door.model}", "--yolo", "--exit-immediately", "--cost-limit=0"],
    environment=lambda door: {
        "OPENAI_API_BASE": door.url,
        "OPENAI_API_KEY": door.key,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    answer=_of_mini,
    instruction="--task=",
    version="--help",
)

PRESETS: Mapping[str, Preset] = {
    made.name: made for made in (CLAUDE_CODE, CODEX, OPENCODE, GEMINI_CLI, AIDER, MINI_SWE_AGENT)
}
