"""The real command-line agents, in real sandboxes, through the gateway: a conversation with a tool call.

They are installed by `scripts/clients`. Where one is missing its tests are skipped, but never in CI.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.live.test_transcript_secrets import found
from tests.wait_bounds import stretch
from zstandard import ZstdDecompressor

import holdwater as hw
from holdwater.agent.presets import PRESETS
from holdwater.conversation.trajectory import ExchangeTree, render_raw_turn
from holdwater.core.summary import RunSummary
from holdwater.export.formats import export_run
from holdwater.ledger.directory import RunDirectory
from holdwater.sandbox.probe import probe
from holdwater.testing.scripted_model import ScriptedReply, serve_raw

pytestmark = pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true",
    reason=f"bubblewrap does not work here: {probe().why_not}",
)

PROGRAMS = Path(__file__).parents[2] / ".clients" / "bin"
KEY = "sk-upstream-8d51c0ffee42"
DONE = "it is done"
BEGINNING = '--write `made.txt`, whatever "$HOME" or {model} is'
ENDING = "that is all, é"
LONG = f"{BEGINNING}\n{'Take your time. ' * 9000}\n{ENDING}"  # longer than an argument can be
SHORT = f"{BEGINNING}\n{ENDING}"
# What a tool can see: its environment, and the environments and command lines of all that runs beside it.
LOOK = (
    "env >env.txt; cat /proc/[0-9]*/environ >others.txt 2>/dev/null; cat /proc/[0-9]*/cmdline >lines.txt; :"
)
COMMAND = f"echo made >made.txt; {LOOK}"
SUITE = """
import holdwater as hw

def instances():
    yield hw.Instance(id="one", instruction=INSTRUCTION)

async def grade(instance, sandbox, answer):
    return await sandbox.read("made.txt") == b"made\\n"

suite = hw.Suite(name="conformance", instances=instances, grade=grade)
"""


def call(name: str, command: str = COMMAND, key: str = "command", **arguments: Any) -> ScriptedReply:
    return ScriptedReply(text="let me", tool_calls=[{"name": name, "arguments": {key: command, **arguments}}])


def edit(name: str) -> ScriptedReply:
    """How aider is told to make a file."""
    return ScriptedReply(text=f"{name}\n```\nmade\n```\n")


class Client(NamedTuple):
    """What the model says to a client, and what of its requests differs between two runs of the same."""

    first: ScriptedReply
    then: ScriptedReply
    returned: str  # what a request has that tells what came of the first reply
    volatile: tuple[str, ...] = ()
    threads: tuple[int, ...] = (2,)  # turns of the trajectory, and of what is beside it
    arguments: str = ""
    instruction: str = LONG
    repeats: bool = True  # two attempts send requests of the same identity


CODEX_VOLATILE = (
    "client_metadata.",
    "prompt_cache_key",
    "input[].id",
    "input[].output",  # begins with a random `Chunk ID` and the seconds that it took
)
CLIENTS = {
    "claude-code": Client(
        first=call("Bash", description="make it"),
        then=ScriptedReply(text=DONE),
        returned='"tool_result"',
        volatile=("metadata.user_id",),
    ),
    "codex": Client(
        first=call("exec_command", key="cmd"),
        then=ScriptedReply(text=DONE),
        returned='"function_call_output"',
        volatile=CODEX_VOLATILE,
    ),
    "opencode": Client(
        first=call("bash", description="make it"),
        then=ScriptedReply(text=DONE),
        returned='"role":"tool"',
        threads=(2, 1),
    ),
    "gemini-cli": Client(
        first=call("run_shell_command"),
        then=ScriptedReply(text=DONE),
        returned='"functionResponse"',
        volatile=("contents[].parts[].functionCall.id", "contents[].parts[].functionResponse.id"),
    ),
    "aider": Client(
        first=edit("made.txt"),
        then=edit("fixed.txt"),
        returned="fixed.txt",  # it tells of the test that failed
        arguments=f"--auto-test --test-cmd '{LOOK}; test -e fixed.txt'",
        instruction=SHORT,  # after a long one it makes a summary, or not, as its threads like
    ),
    "mini-swe-agent": Client(
        first=call("bash"),
        then=call("bash", f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {DONE}"),
        returned='"role":"tool"',
        instruction=SHORT,
    ),
    "openhands": Client(
        first=call("terminal", security_risk="LOW"),
        then=call("finish", DONE, key="message"),
        returned='"role":"tool"',
        instruction=SHORT,
        volatile=("prompt_cache_key", "messages[].content"),  # it tells the model the time of day
        repeats=False,
    ),
}
SLOW = {"openhands"}  # it takes 542 MB: `scripts/proof-clients` installs it


class Upstream:
    """Calls a tool, then says that it is done; to a request without tools it says something short."""

    def __init__(self, client: Client, has_tools: bool = True) -> None:
        self.seen: list[Any] = []
        self.keys: set[str] = set()
        self._client = client
        self._has_tools = has_tools

    def __call__(self, headers: Mapping[str, str], body: bytes) -> ScriptedReply:
        request = json.loads(body)
        self.seen.append(request)
        self.keys |= {headers.get("x-api-key", ""), headers.get("x-goog-api-key", "")}
        self.keys.add(headers.get("Authorization", "").removeprefix("Bearer "))
        if self._has_tools and not request.get("tools"):
            return ScriptedReply(text="A title")
        compact = json.dumps(request, separators=(",", ":"))
        return self._client.then if self._client.returned in compact else self._client.first


class Played(NamedTuple):
    summary: RunSummary
    upstream: Upstream
    url: str
    run: Path


def need(name: str) -> None:
    if shutil.which(name, path=str(PROGRAMS)) is None:
        reason = f"`{name}` is not installed: `scripts/clients` says why"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)


async def play(
    place: Path,
    agent: str,
    upstream: Upstream,
    instruction: str,
    monkeypatch: pytest.MonkeyPatch,
    samples: int = 2,
    server: str = "same",
) -> Played:
    monkeypatch.setenv("PATH", f"{PROGRAMS}:{os.environ['PATH']}")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    file = place / "suite.py"
    file.write_text(f"INSTRUCTION = {instruction!r}\n{SUITE}")
    async with serve_raw(upstream) as url:
        summary = await hw.arun(
            f"{file}:suite",
            agent,
            out=place / "run",
            model="test-model",
            base_url=url,
            upstream_dialect=server,
            workers=1,
            samples=samples,
            concurrency=2,
            retries=0,
            timeout=stretch(100),
        )
    return Played(summary, upstream, url, place / "run")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.proof] if name in SLOW else []) for name in CLIENTS]
)
async def test_a_client(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = CLIENTS[name]
    need(PRESETS[name].program)
    upstream = Upstream(client, has_tools=name != "aider")

    agent = f"{name} {client.arguments}".strip()
    played = await play(tmp_path, agent, upstream, client.instruction, monkeypatch)

    assert played.summary.outcomes == {"passed": 2}, attempts(played.run)
    assert upstream.keys == {KEY, ""}
    for attempt in attempts(played.run):
        assert DONE in json.loads(attempt["answer"]) or name == "aider"
        assert log(played.run, attempt["attempt"]) == ""  # it was tested, so there is nothing to say
    check_record(played, client)
    check_secrets(played)
    if name in ("claude-code", "codex", "gemini-cli"):  # each with a dialect, and streams, of its own
        again = await hw.areplay(played.run, out=tmp_path / "again")
        assert (again.outcomes, again.events) == ({"passed": 2}, {}), attempts(tmp_path / "again")
        assert (again.usage.requests, again.saved.requests) == (0, played.summary.usage.requests)


@pytest.mark.parametrize(
    ("name", "server"),
    [
        ("claude-code", "chat"),
        ("codex", "chat"),
        ("gemini-cli", "chat"),
        ("codex", "messages"),
        ("gemini-cli", "messages"),
    ],
)
async def test_a_client_works_on_a_server_of_another_dialect(
    name: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = CLIENTS[name]
    need(PRESETS[name].program)
    returned = {"chat": '"role":"tool"', "messages": '"tool_result"'}[server]
    upstream = Upstream(client._replace(returned=returned))

    played = await play(tmp_path, name, upstream, SHORT, monkeypatch, samples=1, server=server)

    assert played.summary.outcomes == {"passed": 1}, attempts(played.run)
    roles = [{message["role"] for message in request["messages"]} for request in upstream.seen]
    assert all(("system" in spoken) == (server == "chat") for spoken in roles)
    assert all(DONE in json.loads(attempt["answer"]) for attempt in attempts(played.run))
    check_secrets(played)
    again = await hw.areplay(played.run, out=tmp_path / "again")
    assert (again.outcomes, again.events) == ({"passed": 1}, {}), attempts(tmp_path / "again")


def check_record(played: Played, client: Client) -> None:
    """What the upstream saw is in the record; both attempts asked the same, but for what is volatile."""
    directory = RunDirectory.open(played.run)
    both, identities = [], []
    for attempt in (1, 2):
        tree = ExchangeTree(directory, attempt)
        threads = tree.threads()
        assert [len(thread.numbers) for thread in threads] == list(client.threads)
        numbers = [number for thread in threads for number in thread.numbers]
        assert tree.exchange(threads[0].numbers[0]).parent is None
        for exchange in map(tree.exchange, numbers):
            assert (exchange.status, exchange.error) == (200, "")
            assert exchange.usage.input_tokens > 0 and exchange.usage.output_tokens > 0
        identities.append([tree.exchange(number).identity for number in numbers])
        both.append([json.loads(b"".join(render_raw_turn(tree, n)))["request"] for n in numbers])
    recorded = [request for requests in both for request in requests]
    assert sorted(map(told, recorded)) == sorted(map(told, played.upstream.seen))
    assert any(BEGINNING in text for text in texts(both[0][0]))
    assert any(ENDING in text for text in texts(both[0][0]))
    assert (
        not client.repeats or identities[0] == identities[1]
    )  # so that an attempt that is tried again pays for none of it
    assert [path for path in differences(*both) if not path.startswith(tuple(client.volatile))] == []


def check_secrets(played: Played) -> None:
    """Nothing in the sandbox or in the run directory knows the upstream, and no argument shows a key."""
    assert found(KEY, played.run) == []
    for attempt in attempts(played.run):
        files = salvaged(played.run, attempt["attempt"])
        assert set(files) <= {"made.txt", "fixed.txt", "env.txt", "others.txt", "lines.txt"}
        address = played.url.removeprefix("http://").removesuffix("/v1")
        assert all(address.encode() not in content for content in files.values())
        keys = set(re.findall(rb"(?:API_KEY|AUTH_TOKEN)=(\S+)", files["env.txt"]))
        assert len(keys) == 1  # the attempt's own
        assert keys.pop() not in files["lines.txt"]
        assert b"HOLDWATER_RUN=" in files["others.txt"]


async def test_codex_goes_on_when_it_gets_no_websocket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own provider asks for one first; it is refused at once, and asked for no second time."""
    client = CLIENTS["codex"]
    line = (
        'cat "$HOLDWATER_INSTRUCTION_FILE" | CODEX_API_KEY=$OPENAI_API_KEY RUST_LOG=info codex exec --json - '
        "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --model=$HOLDWATER_MODEL "
        "--config=features.plugins=false --config=analytics.enabled=false "
        '--config=openai_base_url=\\"$OPENAI_BASE_URL\\"'
    )

    need("codex")
    played = await play(tmp_path, f"command:sh -c '{line}'", Upstream(client), SHORT, monkeypatch, samples=1)

    assert played.summary.outcomes == {"passed": 1}, attempts(played.run)
    printed = "".join(path.read_text() for path in (played.run / "logs").glob("*.out"))
    assert printed.count('log_only: event.name="codex.websocket_connect"') == 1
    assert "status_code=426" in printed
    assert len(played.upstream.seen) == 2


def attempts(run: Path) -> list[Any]:
    out = io.BytesIO()
    export_run(run, "attempts", "jsonl", out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def log(run: Path, attempt: int) -> str:
    """What the agent had to say, beside what its program printed."""
    return "".join(path.read_text() for path in (run / "logs").glob(f"{attempt:06d}-*.log"))


def salvaged(run: Path, attempt: int) -> dict[str, bytes]:
    """What an attempt left in its working directory."""
    path = run / "artifacts" / f"{attempt:06d}.tar.zst"
    content = ZstdDecompressor().stream_reader(path.read_bytes()).read()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        files = {member.name: tar.extractfile(member) for member in tar}
        return {name.removeprefix("work/"): file.read() for name, file in files.items() if file is not None}


def told(request: Any) -> str:
    return json.dumps(meant(request), sort_keys=True)


def meant(value: Any) -> Any:
    """Without hints for a cache, and a block of text that is alone as the text: their place is not kept."""
    if isinstance(value, dict):
        kept = {key: meant(inner) for key, inner in value.items() if key != "cache_control"}
        content = kept.get("content")
        if isinstance(content, list) and [set(block) for block in content] == [{"type", "text"}]:
            kept["content"] = content[0]["text"]
        return kept
    return [meant(inner) for inner in value] if isinstance(value, list) else value


def texts(value: Any) -> Iterator[str]:
    """Every string in it."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts(inner)


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two values differ; at the top, which of their keys."""
    if type(one) is type(other) is dict:
        for key in one.keys() | other.keys():
            yield from differences(one.get(key), other.get(key), f"{path}.{key}" if path else key)
    elif type(one) is type(other) is list and len(one) == len(other):
        for a, b in zip(one, other, strict=True):
            yield from differences(a, b, f"{path}[]" if path else "")
    elif one != other:
        yield path
