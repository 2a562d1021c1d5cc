"""Finding agents: by name, command, file, module and entry point."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from holdwater.agent.loader import list_agents, load, make_absolute, python
from holdwater.core.errors import BadInput, RunFailed

AGENTS = '''
from holdwater.core.authoring import Agent

async def solve(instance, sandbox, model):
    """Solves.

    At length."""

def blocking(instance, sandbox, model):
    return "x"

def two(instance, sandbox):
    return "x"

made = Agent(name="made", act=blocking, uses_model=False)
number = 7
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "agents.py"
    path.write_text(AGENTS)
    return path


def refusal(spec: str) -> BadInput:
    with pytest.raises(BadInput) as caught:
        load(spec)
    return caught.value


def test_the_built_in_ones_are_known_by_name() -> None:
    built_in = ["bash", "oracle", "nop", "gold", "empty", "openhands-sdk", "command"]
    assert [k.name for k in list_agents()][:7] == built_in
    assert [load(name).uses_model for name in ("bash", "oracle", "nop")] == [True, False, False]


def test_a_function_is_an_agent_as_it_is(file: Path) -> None:
    found = load(f"{file}:solve")

    assert (found.name, found.description) == ("agents.py:solve", "Solves.")
    assert inspect.iscoroutinefunction(found.act)
    assert not inspect.iscoroutinefunction(load(f"{file}:blocking").act)


def test_an_agent_is_an_agent(file: Path) -> None:
    assert load(f"{file}:made").name == "made"


def test_a_function_given_directly_is_named_by_where_it_is() -> None:
    async def solve(instance: object, sandbox: object, model: object) -> None: ...

    assert python(solve).name.endswith(
        ":test_a_function_given_directly_is_named_by_where_it_is.<locals>.solve"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "not an agent: `{file}:number` is of type `int`"),
        ("two", "`agents.py:two` must take three arguments: `(instance, sandbox, model)`"),
        ("gone", "`{file}` has no `gone`"),
    ],
)
def test_an_invalid_agent_is_refused(file: Path, name: str, message: str) -> None:
    assert refusal(f"{file}:{name}").message == message.format(file=file)


def test_an_unknown_name_lists_the_known_and_guesses() -> None:
    error = refusal("orcale")

    presets = "`claude-code`, `codex`, `opencode`, `gemini-cli`, `aider`, `mini-swe-agent`, `openhands`"
    assert error.message == (
        "unknown agent: `orcale`; known are `bash`, `oracle`, `nop`, `gold`, `empty`, `openhands-sdk`, "
        "`command`, " + presets
    )
    assert error.hint == "did you mean `oracle`?"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "the agent's command is empty"),
        ("''", "the agent's command is empty"),
        ("agent {prompt}", "unknown placeholder in the agent's command: `{prompt}`"),
        ("agent {}", "unknown placeholder in the agent's command: `{}`"),
        ("agent {id!r}", "unknown placeholder in the agent's command: `{id!r}`"),
        ("agent {id:>9}", "unknown placeholder in the agent's command: `{id:>9}`"),
        ("agent --x={", "unmatched brace in the agent's command: `--x={`"),
        ("{workdir}/agent", "the agent's program cannot be a placeholder: `{workdir}/agent`"),
        ("agent 'open", "cannot read the agent's command: No closing quotation: `agent 'open`"),
    ],
)
def test_a_template_that_cannot_be_filled_in_is_refused(template: str, message: str) -> None:
    assert refusal(f"command:{template}").message == message


def test_a_command_without_a_template_asks_for_one() -> None:
    assert refusal("command").message == "the agent's command is empty"


def test_a_missing_program_is_found_before_the_run_starts() -> None:
    agent = load("command:no-such-agent-anywhere {instruction}")
    assert agent.check is not None
    with pytest.raises(RunFailed) as caught:
        agent.check()

    assert caught.value.kind == "agent-missing"
    assert caught.value.message == "the agent's program is missing: `no-such-agent-anywhere`"


@pytest.mark.parametrize("program", ["sh", "./in-the-sandbox", "/opt/agent"])
def test_a_path_is_left_to_the_sandbox(program: str) -> None:
    agent = load(f"command:{program}")
    assert agent.check is not None

    agent.check()


def test_a_spec_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert make_absolute("agents.py:solve") == f"{tmp_path}/agents.py:solve"
    assert make_absolute("command:python3 agent.py:x {id}") == "command:python3 agent.py:x {id}"
    assert make_absolute("bash") == "bash"


def test_entry_points_bring_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brought_agents.py").write_text(AGENTS)
    info = tmp_path / "agents-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: agents\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[holdwater.agents]\nsolver = brought_agents:solve\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert load("solver").name == "solver"
    assert ("solver", "agents") in [(k.name, k.source) for k in list_agents()]
