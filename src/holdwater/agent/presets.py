"""Presets for well-known command-line agents, which run headless in a sandbox with our model.

A preset is data: the command, its variables, and how to find the final answer in its output. `preset` runs
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

# Uses the file in its first argument as standard input, removes the file, and executes the other arguments.
STDIN_FROM_FILE = 'exec <"$1" && rm -f "$1"; rmdir "${1%/*}" 2>/dev/null; shift; exec "$@"'
# Without a selected login method, a base URL makes Gemini CLI select one that it then rejects.
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
ARGUMENT_HINT = "shorten the instruction, or use an agent that reads it from its standard input"

log = logging.getLogger(__name__)


class ModelEndpoint(NamedTuple):
    """The model's address, as seen by a client in the sandbox."""

    model: str
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
    words: Callable[[ModelEndpoint], list[str]]
    environment: Callable[[ModelEndpoint], dict[str, str]]
    answer: Callable[[str], str | None] = lambda printed: None  # extracts the answer; None: the whole output
    instruction: str = ""  # prefix of an instruction that is passed as an argument
    prelude: str = ""  # shell lines that run first, if the instruction is on standard input
    version: str = "--version"  # the argument that prints the version

    @property
    def versions(self) -> str:
        return " to ".join(dict.fromkeys(self.tested))

    @property
    def description(self) -> str:
        return f"{self.title}, using the {self.dialect} dialect; tested: {self.versions}; `{self.install}`"


def preset(name: str, extra: str = "") -> Agent:
    """Return the agent that runs this client, with `extra` arguments at the end of its command line."""
    made = PRESETS[name]
    try:
        added = shlex.split(extra)
    except ValueError as error:
        raise BadInput(f"cannot read the agent's arguments: {error}: `{extra}`") from None
    version = _ClientVersion(made)

    async def act(instance: Instance, sandbox: Sandbox, model: Model) -> str:
        door = ModelEndpoint(model.name, model.sandbox_url, model.sandbox_url.removesuffix("/v1"), model.key)
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
        name=f"{name} {extra}".strip(),
        act=act,
        needs_model=True,
        check=lambda: command.check_program(made.program, made.install),
        description=made.description,
        paths=command.find_paths(made.program, *added),
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
        told = explain_version(made, said.stdout) if said.ok else ""
        if told:
            log.warning("agent.untested %s", told)
        return told


def explain_version(made: AgentPreset, said: str) -> str:
    """Return a warning about the version; an empty string if it is a tested one."""
    found = re.search(r"\d{1,9}(\.\d{1,9})+", said)
    if found is not None and _parse_version(made.tested[0]) <= _parse_version(found[0]) <= _parse_version(
        made.tested[1]
    ):
        return ""
    version = found[0] if found else "unknown"
    return f"`{made.program}` has version {version}; tested versions: {made.versions}"


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _find_last(printed: str, extract: Callable[[dict[str, object]], object]) -> str | None:
    """Apply `extract` to the lines of JSON, last first; return its first text."""
    for line in reversed(printed.splitlines()):
        try:
            found = extract(msgspec.json.decode(line, type=dict[str, object]))
        except (msgspec.MsgspecError, RecursionError):
            continue  # not JSON: other output
        if isinstance(found, str):
            return found
    return None


def _parse_claude(printed: str) -> str | None:
    return _find_last(printed, lambda event: event.get("result"))


def _parse_codex(printed: str) -> str | None:
    def extract_message(event: dict[str, object]) -> object:
        item = event.get("item")
        said = isinstance(item, dict) and item.get("type") == "agent_message"
        return item.get("text") if isinstance(item, dict) and said else None

    return _find_last(printed, extract_message)


def _parse_opencode(printed: str) -> str | None:
    def extract_text(event: dict[str, object]) -> object:
        part = event.get("part")
        return part.get("text") if isinstance(part, dict) and event.get("type") == "text" else None

    return _find_last(printed, extract_text)


def _parse_gemini(printed: str) -> str | None:
    """Parse one multi-line JSON document, which may follow other output."""
    try:
        found = msgspec.json.decode(printed[printed.index("\n{\n") if printed[:1] != "{" else 0 :])
    except (ValueError, RecursionError):
        return None
    said = found.get("response") if isinstance(found, dict) else None
    return said if isinstance(said, str) else None


def _parse_mini(printed: str) -> str | None:
    """Return the submission, which is at the end of the output."""
    _, found, rest = printed.rpartition("\nExit:\n")
    return rest.partition("\nSaved trajectory to")[0].strip() if found else None


def _quote_toml(text: str) -> str:
    """Quote a string for TOML, which accepts JSON strings."""
    return msgspec.json.encode(text).decode()


def _opencode_config(door: ModelEndpoint) -> str:
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


CLAUDE_CODE = AgentPreset(
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
        "IS_SANDBOX": "1",  # Claude Code lets root skip permissions only in a declared sandbox
    },
    answer=_parse_claude,
)

CODEX = AgentPreset(
    name="codex",
    title="Codex",
    program="codex",
    install="npm install -g @openai/codex@0.166.0",
    tested=("0.155.0", "0.166.0"),
    dialect="responses",
    # Use a custom provider: the built-in one tries WebSockets first.
    words=lambda door: [
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "--json",
        f"--model={door.model}",
        "--config=analytics.enabled=false",
        "--config=features.plugins=false",  # otherwise it looks for plugins without a network, and waits
        "--config=model_provider=holdwater",
        "--config=model_providers.holdwater.name=holdwater",
        f"--config=model_providers.holdwater.base_url={_quote_toml(door.url)}",
        "--config=model_providers.holdwater.env_key=OPENAI_API_KEY",
        "--config=model_providers.holdwater.wire_api=responses",
        "-",
    ],
    environment=lambda door: {"OPENAI_API_KEY": door.key},
    answer=_parse_codex,
)

OPENCODE = AgentPreset(
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
    answer=_parse_opencode,
)

GEMINI_CLI = AgentPreset(
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
        "GEMINI_CLI_NO_RELAUNCH": "true",  # prevents a relaunch in a child process with more memory
    },
    prelude=GEMINI_SETTINGS,
    answer=_parse_gemini,
)

AIDER = AgentPreset(
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
    prelude="git rev-parse --git-dir >/dev/null 2>&1 || export AIDER_GIT=false",  # prevents a new repository
)

MINI_SWE_AGENT = AgentPreset(
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
    answer=_parse_mini,
    instruction="--task=",
    version="--help",
)

PRESETS: Mapping[str, AgentPreset] = {
    made.name: made for made in (CLAUDE_CODE, CODEX, OPENCODE, GEMINI_CLI, AIDER, MINI_SWE_AGENT)
}
