"""The options of the agent `openhands-sdk`, without its packages: parsed and checked before a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdwater.agent.loader import find_agent
from holdwater.agent.openhands.settings import SdkSettings, parse_settings
from holdwater.core.authoring import Agent
from holdwater.core.errors import BadInput
from holdwater.core.option_values import parse_agent_options


def refuse(*pairs: str) -> BadInput:
    with pytest.raises(BadInput) as caught:
        find_agent("openhands-sdk", parse_agent_options(list(pairs)))
    return caught.value


def test_values_have_the_types_of_their_fields() -> None:
    parsed = parse_settings(
        parse_agent_options(["max_iterations=7", "condenser=none", "tools=terminal", "stuck_detection=false"])
    )

    assert parsed == SdkSettings(max_iterations=7, condenser="none", tools="terminal", stuck_detection=False)


@pytest.mark.parametrize(
    ("pair", "message", "hint"),
    [
        (
            "max_iteration=7",
            "unknown option of agent `openhands-sdk`: `max_iteration`",
            "did you mean `max_iterations`?",
        ),
        ("max_iterations=many", "`--agent-option max_iterations`: expected `int`, got `str`: `many`", ""),
        ("max_iterations=0", "`--agent-option max_iterations`: expected `int` >= 1: `0`", ""),
        ("condenser=short", "`--agent-option condenser`: invalid enum value 'short': `short`", ""),
        (
            "condenser_keep=40",
            "`--agent-option condenser_keep`: expected less than half of `condenser_size`, 80, minus 1: `40`",
            "",
        ),
        (
            "tools=terminal,grep",
            "`--agent-option tools`: expected some of `terminal`, `file_editor`, `task_tracker`: `grep`",
            "with `--agent-option python=PATH` it runs in the sandbox, and has `grep`",
        ),
        ("tools=,", "`--agent-option tools`: no tool: `,`", ""),
    ],
)
def test_an_invalid_option_is_refused_by_its_name(pair: str, message: str, hint: str) -> None:
    error = refuse(pair)

    assert (error.message, error.hint) == (message, hint)


def test_a_prompt_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")

    assert "No such file or directory" in refuse(f"system_prompt={tmp_path}/gone").message
    assert "the file is empty" in refuse(f"system_prompt={tmp_path}/empty").message


def test_paths_become_absolute_for_a_resume_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("Be brief.")
    monkeypatch.chdir(tmp_path)

    agent = find_agent("openhands-sdk", {"system_prompt": "prompt.txt", "python": "bin/python"})

    assert dict(agent.options) == {
        "system_prompt": str(tmp_path / "prompt.txt"),
        "python": str(tmp_path / "bin/python"),
    }


def test_an_agent_without_options_refuses_them() -> None:
    with pytest.raises(BadInput, match="agent `nop` has no options: `--agent-option x`"):
        find_agent("nop", {"x": 1})


def test_an_agent_of_a_user_may_have_options() -> None:
    def configure(options: Any) -> Agent:
        return Agent(name="mine", act=lambda *_: options["words"], options=options)

    mine = Agent(name="mine", act=lambda *_: "", configure=configure)

    assert find_agent(mine, {"words": "hello"}).act(None, None, None) == "hello"
    assert find_agent(mine, {}) is mine
