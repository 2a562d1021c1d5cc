"""The presets: well-known command-line agents, and how to find the final answer in the output of each.

`client_preset.py` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from ..core.authoring import Agent
from ..core.records import MiB
from .client_preset import AgentPreset, ModelEndpoint, make_agent

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


def _parse_openhands(printed: str) -> str | None:
    """Return the message of the last finish action, or the text of the last message without an action."""

    def extract_message(event: dict[str, object]) -> object:
        action, message = event.get("action"), event.get("llm_message")
        if isinstance(action, dict) and action.get("kind") == "FinishAction":
            return action.get("message")
        if event.get("source") != "agent" or not isinstance(message, dict):
            return None
        parts = message.get("content")
        blocks = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        return "".join(str(block.get("text", "")) for block in blocks) or None

    return _find_last(printed, extract_message)


def _quote_toml(text: str) -> str:
    """Quote a string for TOML, which accepts JSON strings."""
    return msgspec.json.encode(text).decode()


def _opencode_config(door: ModelEndpoint) -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "holdwater",
        "options": {"baseURL": door.url, "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {name: {"name": name} for name in (door.model, door.side_model)},
    }
    config = {
        "model": f"holdwater/{door.model}",
        "small_model": f"holdwater/{door.side_model}",
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
    memory=128 * MiB,
    words=lambda door: [
        "--print",
        "--dangerously-skip-permissions",
        "--output-format=json",
        f"--model={door.model}",
    ],
    environment=lambda door: {
        "ANTHROPIC_BASE_URL": door.root,
        "ANTHROPIC_AUTH_TOKEN": door.key,
        "ANTHROPIC_SMALL_FAST_MODEL": door.side_model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": door.side_model,
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
    memory=48 * MiB,
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
    memory=480 * MiB,
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
    memory=240 * MiB,
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
    memory=240 * MiB,
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
    memory=240 * MiB,
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

OPENHANDS = AgentPreset(
    name="openhands",
    title="OpenHands",
    program="openhands",
    install="uv tool install openhands==1.16.0 -p 3.12",
    tested=("1.16.0", "1.16.0"),
    dialect="chat",
    memory=288 * MiB,
    words=lambda door: ["--headless", "--json", "--override-with-envs"],
    environment=lambda door: {
        "LLM_MODEL": f"openai/{door.model}",
        "LLM_BASE_URL": door.url,
        "LLM_API_KEY": door.key,
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    answer=_parse_openhands,
    instruction="--task=",
    mark="OpenHands CLI",
)

PRESETS: Mapping[str, AgentPreset] = {
    made.name: made for made in (CLAUDE_CODE, CODEX, OPENCODE, GEMINI_CLI, AIDER, MINI_SWE_AGENT, OPENHANDS)
}


def preset(name: str, extra: str = "") -> Agent:
    """Return the agent that runs this client, with `extra` arguments at the end of its command line."""
    return make_agent(PRESETS[name], extra)
