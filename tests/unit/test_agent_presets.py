"""Presets with a stand-in for each program: what it is given, where its answer is, how it fails.

The real programs are in tests/live/test_conformance_clients.py.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.directory_sandbox import Directory

from holdwater.agent.client_preset import AgentPreset, ModelEndpoint, explain_version
from holdwater.agent.command import LONGEST_ARGUMENT
from holdwater.agent.loader import list_agents, load, make_absolute
from holdwater.agent.presets import PRESETS, preset
from holdwater.core.errors import AgentFailed, BadInput, RunFailed
from holdwater.core.records import CommandResult, Instance

ROOT = Path(__file__).parents[2]
# Of version 1.16.0, without the event that names the machine's interpreter.
OPENHANDS_OUTPUT = ROOT / "tests/clients/openhands_output.txt"
STAND_IN = """#!/bin/sh
case "$1" in --version|--help) echo "it is 1, version {version}"; exit 0;; esac
printf '%s\\n' "$@" >../words; env >../environment; cat >../stdin
{then}
"""
LONG = "--é $HOME\n" + "x" * LONGEST_ARGUMENT
EACH = pytest.mark.parametrize("made", PRESETS.values(), ids=PRESETS)


class Home(Directory):
    """With a home of its own, as sandboxes have it."""

    async def run(
        self, command: str | Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> CommandResult:
        return await super().run(command, env={"HOME": f"{self.base}/../home", **(env or {})}, **options)


class Gate:
    """A model that is only looked at."""

    name = "a/model"
    side_name = "a/small-model"
    url = "http://worker/v1"
    sandbox_url = "http://sandbox:4141/v1"
    key = "key-1"


class Place:
    """A directory with a working directory in it, and a stand-in on PATH."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        (path / "bin").mkdir()
        (path / "work").mkdir()
        monkeypatch.setenv("PATH", f"{path}/bin:/usr/bin:/bin")

    def stand_in(self, made: AgentPreset, version: str = "", then: str = "echo done") -> None:
        program = self.path / "bin" / made.program
        program.write_text(STAND_IN.format(version=version or made.tested[1], then=then))
        program.chmod(0o755)

    async def act(self, spec: str, instruction: str = "do") -> str:
        acted = await load(spec).act(
            Instance(id="i", instruction=instruction), Home(self.path / "work"), Gate()
        )
        assert isinstance(acted, str)
        return acted

    def read(self, name: str) -> str:
        return (self.path / name).read_text()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


@EACH
async def test_it_gets_the_instruction_as_it_is(made: AgentPreset, place: Place) -> None:
    place.stand_in(made)
    instruction = LONG if not made.instruction else LONG[:1000]

    assert await place.act(made.name, instruction) == "done\n"

    if made.instruction:
        assert place.read("words").endswith(f"\n--task={instruction}\n")
    else:
        assert place.read("stdin") == instruction
    assert list((place.path / "work").iterdir()) == []


@EACH
async def test_a_preset_gets_the_models_address_and_shows_no_key(made: AgentPreset, place: Place) -> None:
    place.stand_in(made)

    await place.act(made.name)

    told = place.read("environment") + place.read("words")
    assert "http://sandbox:4141" in told and "worker" not in told
    assert "=key-1\n" in place.read("environment")
    assert "key-1" not in place.read("words")
    assert "a/model" in told


async def test_an_instruction_that_can_be_no_argument_is_said(place: Place) -> None:
    place.stand_in(PRESETS["mini-swe-agent"])

    with pytest.raises(AgentFailed, match="is longer than") as caught:
        await place.act("mini-swe-agent", LONG)

    assert caught.value.kind == "argument"


async def test_arguments_follow_the_name(place: Place) -> None:
    place.stand_in(PRESETS["claude-code"])

    await place.act("claude-code --max-turns 20 --append-system-prompt 'be brief'")

    assert place.read("words").endswith("\n--max-turns\n20\n--append-system-prompt\nbe brief\n")


def test_arguments_mean_the_same_anywhere() -> None:
    assert make_absolute("aider --test-cmd t.py:x") == "aider --test-cmd t.py:x"
    with pytest.raises(BadInput, match="cannot read the agent's arguments"):
        load("aider 'x")


@EACH
async def test_a_missing_program_stops_the_run_and_says_how_to_install_it(
    made: AgentPreset, place: Place
) -> None:
    agent = preset(made.name)
    assert agent.check is not None

    with pytest.raises(RunFailed) as early:
        agent.check()
    with pytest.raises(RunFailed) as late:
        await place.act(made.name)

    for caught in (early, late):
        assert (caught.value.kind, caught.value.hint) == ("agent-missing", f"`{made.install}`")


async def test_a_version_that_was_not_tested_is_a_warning(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.stand_in(PRESETS["codex"], version="7.0.1")
    agent = preset("codex")

    for _ in range(2):
        await agent.act(Instance(id="i", instruction="do"), Home(place.path / "work"), Gate())

    [said] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert said.getMessage().startswith("agent.untested `codex` has version 7.0.1; tested versions: ")


async def test_a_status_is_the_agents_failure_and_an_untested_version_a_hint(place: Place) -> None:
    place.stand_in(PRESETS["codex"], version="7.0.1", then="echo it broke >&2; exit 3")

    with pytest.raises(AgentFailed) as caught:
        await place.act("codex")

    assert (caught.value.kind, caught.value.message) == ("exit", "`codex` ended with status 3: it broke")
    assert caught.value.hint.startswith("`codex` has version 7.0.1")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("codex-cli {oldest}", ""),
        ("{newest}\n", ""),
        ("{newest}.1", "`codex` has version {newest}.1; tested versions: {oldest} to {newest}"),
        ("0.99.0", "`codex` has version 0.99.0; tested versions: {oldest} to {newest}"),
        ("who knows", "`codex` has version unknown; tested versions: {oldest} to {newest}"),
    ],
)
def test_versions_are_numbers(said: str, told: str) -> None:
    oldest, newest = tested = PRESETS["codex"].tested
    assert oldest.startswith("0.1") and len(oldest.split(".")[1]) == 3  # as text, 0.99 would come later

    found = explain_version("codex", tested, said.format(oldest=oldest, newest=newest))

    assert found == told.format(oldest=oldest, newest=newest)


@pytest.mark.parametrize(
    ("name", "printed", "answer"),
    [
        ("claude-code", '{"type":"result","is_error":false,"result":"a\\nb"}\n', "a\nb"),
        ("claude-code", "no JSON", None),
        (
            "codex",
            '{"type":"item.completed","item":{"type":"agent_message","text":"first"}}\n'
            'not JSON\n{"type":"item.completed","item":{"type":"agent_message","text":"last"}}\n'
            '{"type":"item.completed","item":{"type":"error","text":"x"}}\n{"type":"turn.completed"}\n',
            "last",
        ),
        ("codex", '{"item":[]}\n[1]\n', None),
        ("opencode", '{"type":"text","part":{"text":"last"}}\n{"type":"step_finish","part":{}}\n', "last"),
        ("gemini-cli", 'a note\n{\n  "response": "last"\n}\n', "last"),
        ("gemini-cli", '{\n  "response": "last"\n}\n', "last"),
        ("gemini-cli", '{\n  "error": {}\n}\n', None),
        ("gemini-cli", "{cut", None),
        ("aider", "all of it", None),
        ("mini-swe-agent", "\nExit:\nnot yet\nExit:\nlast\n\nSaved trajectory to 'x'\n", "last"),
        ("mini-swe-agent", "nothing", None),
        ("openhands", OPENHANDS_OUTPUT.read_text("utf-8"), "all done"),
        (
            "openhands",
            '{"source":"user","llm_message":{"content":[{"text":"do"}]},"kind":"MessageEvent"}\n'
            '{"source":"agent","llm_message":{"content":[{"text":"no "},{"text":"tool"}]}}\n'
            '{"source":"environment","observation":{"content":[{"text":"x"}]},"kind":"ObservationEvent"}\n',
            "no tool",
        ),
        ("openhands", "Agent finished\n", None),
    ],
)
def test_the_answer_is_its_last_words(name: str, printed: str, answer: str | None) -> None:
    assert PRESETS[name].answer(printed) == answer


def test_strange_names_stay_values() -> None:
    door = ModelEndpoint(model='a"b\\c', side_model="small", url='http://x"y/v1', root='http://x"y', key="k")

    config = json.loads(PRESETS["opencode"].environment(door)["OPENCODE_CONFIG_CONTENT"])

    assert list(config["provider"]["holdwater"]["models"]) == ['a"b\\c', "small"]
    assert config["small_model"] == "holdwater/small"
    claude = PRESETS["claude-code"].environment(door)
    assert claude["ANTHROPIC_SMALL_FAST_MODEL"] == claude["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "small"
    assert '--config=model_providers.holdwater.base_url="http://x\\"y/v1"' in PRESETS["codex"].words(door)


@EACH
def test_the_listing_manual_and_installation_of_a_preset_agree(made: AgentPreset) -> None:
    """The listing, the manual and the tests' own installation agree."""
    [listed] = [one for one in list_agents() if one.name == made.name]
    assert made.install in listed.description and made.versions in listed.description
    package = next(word for word in made.install.split() if made.tested[1] in word)
    installed = (ROOT / "scripts/clients").read_text() + (ROOT / "scripts/proof-clients").read_text()
    assert package in re.split(r"[\s()]+", installed)
    row = f"| `{made.name}` | {made.title} | {made.dialect} | {made.versions} | `{made.install}` |"
    assert row in (ROOT / "docs/agents.md").read_text()
