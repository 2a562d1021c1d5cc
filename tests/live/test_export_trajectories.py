"""Trajectories for other programs: ATIF as its own reader takes it, and conversations for fine-tuning."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.export_readers import read_by_others
from tests.ledger_runs import new_run, passed, planned
from tests.recorded_conversations import CONVERSATIONS, IMAGE, PIXELS, SCHEMA, Recording, chat, recorded, says

import holdwater as hw
from holdwater.cli import main
from holdwater.core.records import Attempt, Outcome
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.ledger import Ledger

NAMES = sorted(CONVERSATIONS)
READ = """
import sys
from pathlib import Path
from harbor.utils.trajectory_validator import TrajectoryValidator
for path in sys.argv[1:]:
    validator = TrajectoryValidator()
    if not validator.validate(Path(path)):
        sys.exit(f"{path}: {validator.get_errors()}")
"""


# ATIF v1.8 as its description has it: nothing but these keys.


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Source(Strict):
    media_type: str
    path: str


class Part(Strict):
    type: str
    text: str | None = None
    source: Source | None = None


class Call(Strict):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class Result(Strict):
    source_call_id: str | None = None
    content: str | list[Part] | None = None
    extra: dict[str, Any] = {}


class Observation(Strict):
    results: list[Result]


class Metrics(Strict):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost_usd: float | None = None
    prompt_token_ids: list[int] = []
    completion_token_ids: list[int] = []
    logprobs: list[float] = []


class Step(Strict):
    step_id: int
    timestamp: str
    source: str
    message: str | list[Part]
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] = []
    observation: Observation | None = None
    metrics: Metrics | None = None
    llm_call_count: int | None = None
    extra: dict[str, Any] = {}


class AtifAgent(Strict):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] = []


class Final(Strict):
    total_prompt_tokens: int
    total_completion_tokens: int
    total_cached_tokens: int
    total_steps: int
    total_cost_usd: float | None = None


class Trajectory(Strict):
    schema_version: str
    session_id: str
    trajectory_id: str
    agent: AtifAgent
    steps: list[Step]
    final_metrics: Final
    subagent_trajectories: list[Trajectory] = []
    extra: dict[str, Any] = {}


def atif(run: Path, into: Path) -> list[Trajectory]:
    hw.export(run, into, format="atif")
    files = sorted(into.glob("*.json"))
    return [msgspec.json.decode(path.read_bytes(), type=Trajectory) for path in files]


async def talk(path: Path, *exchanges: tuple[dict[str, Any], Any, str]) -> RunDirectory:
    """A run with one attempt that passed, and made these exchanges in chat."""
    directory = new_run(path, model="m")
    async with Ledger(directory) as ledger:
        await ledger.plan([planned("../x y")])
        await ledger.begin_attempt(Attempt(id=1, instance=1, sample=0, number=1))
        recording = Recording(directory, 1)
        for request, reply, error in exchanges:
            recording.add(request, reply, error, 429 if error else 200)
        recording.log.close()
        await ledger.settle(passed(1, ledger.token, len(exchanges)))
        await ledger.close_sample(Outcome(instance=1, sample=0, attempt=1, kind="passed", score=1.0))
    return directory


@pytest.mark.parametrize("name", NAMES)
async def test_a_conversation_in_any_dialect_is_the_same_atif(tmp_path: Path, name: str) -> None:
    await recorded(tmp_path / "run", **{name: True})

    [made] = atif(tmp_path / "run", tmp_path / "out")

    system, user, look, end = made.steps
    assert [step.step_id for step in made.steps] == [1, 2, 3, 4]
    assert [step.source for step in made.steps] == ["system", "user", "agent", "agent"]
    assert (system.message, look.message, end.message) == ("You are careful.", "I look.", "a.txt.")
    assert look.reasoning_content == "Look first."
    [call] = look.tool_calls
    assert (call.function_name, call.arguments) == ("bash", {"command": "ls"})
    assert look.observation == Observation([Result(call.tool_call_id, "a.txt")])
    assert look.metrics is not None and look.metrics.prompt_tokens == 100
    assert made.agent.tool_definitions[0]["function"]["parameters"] == SCHEMA
    assert (made.final_metrics.total_steps, made.final_metrics.total_prompt_tokens) == (4, 200)
    assert isinstance(user.message, list)
    source = user.message[1].source
    assert source is not None and source.media_type == "image/png"
    assert (tmp_path / "out" / source.path).read_bytes() == PIXELS


async def test_media_are_files_and_never_base64(tmp_path: Path) -> None:
    small = "data:image/gif;base64,R0lGODlhAQABAAAAACw="
    pdf = "data:application/pdf;base64,JVBERi0="
    parts = [
        {"type": "image_url", "image_url": {"url": small}},
        {"type": "file", "file": {"file_data": pdf}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.webp?x=1"}},
    ]
    request = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    await talk(tmp_path / "run", (request, says(IMAGE), ""))

    [made] = atif(tmp_path / "run", tmp_path / "out")

    text = b"".join(path.read_bytes() for path in (tmp_path / "out").glob("*.json"))
    assert b"base64" not in text and b"R0lGOD" not in text and b"JVBER" not in text
    files = {path.suffix for path in (tmp_path / "out" / "media").iterdir()}
    assert files == {".gif", ".pdf", ".png"}
    gif, document, link = made.steps[0].message
    assert isinstance(gif, Part) and gif.source is not None and gif.source.media_type == "image/gif"
    assert isinstance(document, Part) and (document.text or "").startswith("[application/pdf: media/")
    assert isinstance(link, Part) and link.source == Source("image/webp", parts[2]["image_url"]["url"])


async def test_what_went_beside_and_what_failed_is_in_atif_too(tmp_path: Path) -> None:
    bad = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "not JSON"}}
    await talk(
        tmp_path / "run",
        (chat("a"), says("b", tool_calls=[bad]), ""),
        (chat("title"), says("t"), ""),
        (chat("a", "b", "c"), None, "too many"),
        (chat("a", "b", "c"), says("d"), ""),
    )

    [made] = atif(tmp_path / "run", tmp_path / "out")

    [file] = (tmp_path / "out").glob("*.json")
    assert file.name == "000001-x-y.json"
    assert [(step.source, step.message) for step in made.steps] == [
        ("user", "a"),
        ("agent", "b"),
        ("agent", "b"),  # sent back without its call: the client's words, not the model's
        ("user", "c"),
        ("system", "the model call failed: too many"),
        ("agent", "d"),
    ]
    assert made.steps[1].tool_calls == [Call("c1", "f", {"input": "not JSON"})]
    assert (made.steps[1].llm_call_count, made.steps[2].llm_call_count) == (1, 0)
    [side] = made.subagent_trajectories
    assert [step.message for step in side.steps] == ["title", "t"]
    assert side.trajectory_id != made.trajectory_id


async def test_harbor_reads_what_we_write(tmp_path: Path) -> None:
    await recorded(tmp_path / "run", chat=True, responses=True, messages=False, gemini=True)
    lost = {"role": "tool", "tool_call_id": "gone", "content": "late"}
    request = {"model": "m", "messages": [lost, *chat("a", IMAGE)["messages"]]}
    await talk(
        tmp_path / "odd",
        (request, says("b"), ""),
        (chat("side"), None, "too many"),
    )
    hw.export(tmp_path / "run", tmp_path / "out", format="atif")
    hw.export(tmp_path / "odd", tmp_path / "odd-out", format="atif")

    files = [*(tmp_path / "out").glob("*.json"), *(tmp_path / "odd-out").glob("*.json")]
    read_by_others(READ, *files)

    assert len(files) == 5


# Fine-tuning.


def lines(run: Path, **options: Any) -> list[dict[str, Any]]:
    out = io.BytesIO()
    hw.export(run, out, format="openai-jsonl", **options)
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("name", NAMES)
async def test_a_conversation_in_any_dialect_is_the_same_line(tmp_path: Path, name: str) -> None:
    await recorded(tmp_path, **{name: True})

    [line] = lines(tmp_path)

    call = line["messages"][2]["tool_calls"][0]
    assert json.loads(call["function"].pop("arguments")) == {"command": "ls"}
    assert line["messages"] == [
        {"role": "system", "content": "You are careful."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is here?"},
                {"type": "image_url", "image_url": {"url": IMAGE}},
            ],
        },
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "bash"}}],
        },
        {"role": "tool", "content": "a.txt", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "a.txt."},
    ]
    assert line["tools"][0]["function"]["name"] == "bash"


async def test_only_what_passed_is_for_tuning_unless_all_is_asked_for(tmp_path: Path) -> None:
    await recorded(tmp_path, chat=True, messages=False)

    assert len(lines(tmp_path)) == 1
    assert len(lines(tmp_path, everything=True)) == 2


async def test_a_line_ends_with_the_last_reply_that_came(tmp_path: Path) -> None:
    await talk(tmp_path, (chat("a"), says("b"), ""), (chat("a", "b", "c"), None, "too many"))

    [line] = lines(tmp_path)

    assert line == {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    }


async def test_long_trajectories_are_written_in_pieces(tmp_path: Path) -> None:
    size = 1 << 20
    texts: list[str] = []
    exchanges = []
    for number in range(16):
        texts.append(f"{number}" * size)
        exchanges.append((chat(*texts), says(f"r{number}"), ""))
        texts.append(f"r{number}")
    await talk(tmp_path / "run", *exchanges)
    del texts, exchanges

    tracemalloc.start()
    with (tmp_path / "lines").open("wb") as out:
        hw.export(tmp_path / "run", out, format="openai-jsonl")
    hw.export(tmp_path / "run", tmp_path / "atif", format="atif")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (tmp_path / "lines").stat().st_size > 16 * size
    assert peak < 14 * size


# The command.


async def test_the_command_writes_both(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, out = str(tmp_path / "run"), tmp_path / "out"
    await recorded(tmp_path / "run", chat=True, gemini=False)

    assert main(["export", run, "--format", "atif", "--out", str(out)]) == 0
    assert main(["export", run, "--what", "trajectories", "--format", "openai-jsonl", "--all"]) == 0

    assert sorted(path.name for path in out.iterdir()) == ["000001-chat.json", "000002-gemini.json", "media"]
    assert len(capfd.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--format", "atif"],
        ["--format", "atif", "--what", "outcomes", "--out", "x"],
        ["--what", "trajectories"],
        ["--all"],
    ],
)
async def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    await recorded(tmp_path, chat=True)

    assert main(["export", str(tmp_path), *words]) == 2

    assert capfd.readouterr().out == ""
    assert not Path("x").exists()


async def test_an_output_that_cannot_be_written_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await recorded(tmp_path / "run", chat=True)
    (tmp_path / "file").touch()

    assert main(["export", str(tmp_path / "run"), "--format", "atif", "--out", str(tmp_path / "file")]) == 1

    assert "cannot write" in capfd.readouterr().err
