"""Command agents: real programs, and values that would love to be shell words."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.directory_sandbox import Directory

from holdwater.agent.command import LONGEST_ARGUMENT, command
from holdwater.core.config import Network
from holdwater.core.errors import AgentFailed, ModelFailed, RunFailed
from holdwater.core.records import Instance, Limits
from holdwater.sandbox.process_sandboxes import ProcessSandboxes


class Gate:
    """A model that is only looked at."""

    name = side_name = "the model"
    url = "http://worker/v1"
    sandbox_url = "http://sandbox/v1"
    key = "key-1"

    async def chat(self, messages: Any, **options: Any) -> dict[str, Any]:
        raise NotImplementedError


class NoModel(Gate):
    """What an agent is handed in a run without a model."""

    @property
    def name(self) -> str:  # type: ignore[override]
        raise ModelFailed("this run has no model", kind="none")


async def acted(template: str, base: Path, model: Gate | None = None, **instance: Any) -> str:
    answer = await command(template).act(
        Instance(**{"id": "i", **instance}), Directory(base), model or Gate()
    )
    assert isinstance(answer, str)
    return answer


nasty = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60
) | st.sampled_from(
    [
        "$(touch pwned)",
        "`touch pwned`",
        "'; touch pwned; '",
        '"; touch pwned',
        "{model_key}",
        "{{",
        "* ?",
        "-n",
        "\\",
        "a\nb",
    ]
)


@settings(max_examples=40, deadline=None)
@given(instruction=nasty, before=st.sampled_from(["", "--task=", "{{", "'a b '"]))
def test_a_value_is_one_word_as_it_is(instruction: str, before: str) -> None:
    with tempfile.TemporaryDirectory() as base:
        printed = asyncio.run(
            acted(f"printf %s\\\\0 {before}{{instruction}} end", Path(base), instruction=instruction)
        )
        assert list(Path(base).iterdir()) == []

    prefix = before.replace("{{", "{").strip("'")
    assert printed.split("\0") == [prefix + instruction, "end", ""]


async def test_every_placeholder_is_filled_in(tmp_path: Path) -> None:
    template = (
        "printf '%s|' {id} {instruction} {instruction_file} {workdir} {model} {model_url} {model_key} {{x}}"
    )

    words = (await acted(template, tmp_path, id="a b", instruction="do")).split("|")

    file = f"{tmp_path}-private/instruction.md"
    assert words == ["a b", "do", file, str(tmp_path), "the model", "http://sandbox/v1", "key-1", "{x}", ""]
    assert Path(file).read_text() == "do"


async def test_the_environment_says_the_same(tmp_path: Path) -> None:
    names = ["OPENAI_BASE_URL", "OPENAI_API_KEY", "HOLDWATER_MODEL", "HOLDWATER_ID"]
    line = 'cat "$HOLDWATER_INSTRUCTION_FILE"; echo "' + "".join(f"|${name}" for name in names) + '"'

    printed = await acted(f"sh -c '{line}'", tmp_path, instruction="do")

    assert printed == "do|http://sandbox/v1|key-1|the model|i\n"


async def test_the_sdks_of_all_dialects_find_their_variables(tmp_path: Path) -> None:
    printed = await acted("env", tmp_path)

    found = dict(line.partition("=")[::2] for line in printed.splitlines())
    urls = {name: found[name] for name in found if name.endswith(("_BASE_URL", "_API_BASE"))}
    assert urls == {
        "OPENAI_BASE_URL": "http://sandbox/v1",
        "OPENAI_API_BASE": "http://sandbox/v1",
        "ANTHROPIC_BASE_URL": "http://sandbox",
        "GOOGLE_GEMINI_BASE_URL": "http://sandbox",
    }
    keys = {name for name, value in found.items() if value == "key-1"}
    assert keys == {"OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY"}


async def test_an_instruction_that_is_an_argument_leaves_no_file(tmp_path: Path) -> None:
    await acted("true {instruction}", tmp_path, instruction="do")

    assert list(tmp_path.iterdir()) == []


async def test_an_exit_status_is_the_agents_failure_with_its_last_output(tmp_path: Path) -> None:
    with pytest.raises(AgentFailed) as caught:
        await acted("sh -c 'echo lots; echo it broke >&2; exit 3'", tmp_path)

    assert (caught.value.kind, caught.value.message) == ("exit", "`sh` ended with status 3: it broke")


async def test_a_missing_program_will_hit_every_instance(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        await acted("./agent.sh", tmp_path)

    assert caught.value.kind == "agent-missing"


async def test_a_sandbox_that_looks_first_says_the_same(tmp_path: Path) -> None:
    sandboxes = ProcessSandboxes(tmp_path, f"run-{os.getpid()}", Network.OPEN)
    try:
        async with sandboxes.open(1, Limits(), None) as sandbox:
            with pytest.raises(RunFailed) as caught:
                await command("./agent.sh").act(Instance(id="i"), sandbox, Gate())
    finally:
        sandboxes.threads.shutdown()

    assert caught.value.kind == "agent-missing"


async def test_a_run_without_a_model_is_fine_unless_it_is_named(tmp_path: Path) -> None:
    assert await acted("sh -c 'echo $OPENAI_BASE_URL.'", tmp_path, NoModel()) == ".\n"
    with pytest.raises(ModelFailed):
        await acted("echo {model_url}", tmp_path, NoModel())


async def test_a_program_that_misses_another_fails_alone(tmp_path: Path) -> None:
    with pytest.raises(AgentFailed, match="status 127"):
        await acted("sh -c no-such-program-anywhere", tmp_path)


@pytest.mark.parametrize("instruction", ["x" * (LONGEST_ARGUMENT + 1), "a\0b"])
async def test_what_cannot_be_an_argument_is_said(tmp_path: Path, instruction: str) -> None:
    with pytest.raises(AgentFailed) as caught:
        await acted("echo {instruction}", tmp_path, instruction=instruction)

    assert (caught.value.kind, caught.value.hint) == ("argument", "use `{instruction_file}`")
    assert len(await acted("cat {instruction_file}", tmp_path, instruction=instruction)) == len(instruction)
