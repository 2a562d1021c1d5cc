"""A run without bubblewrap says so, and the provider's key is in no environment that a command could read."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from tests.command_runner import Scene, until
from tests.secret_search import found

from holdwater.ledger.reader import LedgerReader

KEY = "sk-holdwater-test-0123456789"
NODE_KEY = "sk-holdwater-node-0123456789"  # in a variable that the options name
SUITE = """
import asyncio
from pathlib import Path
import holdwater as hw

def instances():
    yield hw.Instance(id="one", instruction="look")

async def grade(instance, sandbox, answer):
    return hw.Grade(passed=True, score=1.0)

async def solve(instance, sandbox, model):
    await model.chat([{"role": "user", "content": "look"}])
    await sandbox.run("cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline > all 2>/dev/null")
    SEEN.with_suffix(".new").write_bytes((await sandbox.read("all")).replace(bytes(1), b" "))
    SEEN.with_suffix(".new").rename(SEEN)
    while not GO.exists():
        await asyncio.sleep(0.02)

suite = hw.Suite(name="scene", instances=instances, grade=grade)
"""
REPLY = {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "seen"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}
# Covers the program in a mount namespace of the command alone.
HIDE = 'for path in $(which -a bwrap); do mount --bind /dev/null "$path"; done; exec "$@"'


class Upstream(BaseHTTPRequestHandler):
    """A model that keeps the keys it is asked with."""

    keys: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.keys.append(self.headers["Authorization"])
        body = json.dumps(REPLY).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    Upstream.keys = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Upstream) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        assert os.environ.get("CI") != "true"
        pytest.skip("only root can hide bubblewrap from a command")
    before = ["unshare", "--mount", "sh", "-c", HIDE, "sh"]
    # The shell and `unshare` would have the key in their environments: `env` gives it to the command alone.
    keys = [f"OPENAI_API_KEY={KEY}", f"NODE_KEY={NODE_KEY}"]
    opened = Scene(tmp_path, before=[*before, "env", *keys])
    lines = [
        "from pathlib import Path",
        f"SEEN = Path({str(tmp_path / 'seen')!r})",
        f"GO = Path({str(tmp_path / 'go')!r})",
    ]
    opened.suite("\n".join(lines) + SUITE)
    yield opened
    opened.close()


# The environment has the name of the test: the key is not part of it.
@pytest.mark.parametrize(
    ("variable", "key"), [("OPENAI_API_KEY", KEY), ("NODE_KEY", NODE_KEY)], ids=["provider", "server"]
)
def test_a_run_without_bubblewrap_says_so_and_keeps_its_key(
    scene: Scene, url: str, variable: str, key: str
) -> None:
    seen, go, file = scene.place / "seen", scene.place / "go", scene.place / "servers.toml"
    file.write_text(f'[[base-url]]\nurl = "{url}"\nkey = "{variable}"\n')

    server = ("--base-url", url) if variable == "OPENAI_API_KEY" else ("--config", str(file))
    command = scene.run(*scene.agent(), "--model", "m", *server, "--workers", "1")
    until("the command in the sandbox has looked", seen.exists)
    conductor = Path(f"/proc/{command.pid}/environ").read_bytes()
    go.touch()

    assert command.wait() == 0, command
    assert Upstream.keys == [f"Bearer {key}"]
    assert variable.encode() not in conductor and key.encode() not in conductor
    assert "HOLDWATER_RUN=" in seen.read_text(errors="replace")  # it did see processes of the host
    assert key not in seen.read_text(errors="replace")
    assert found(key, scene.out) == []
    warnings = [line for line in command.stderr.splitlines() if "sandboxes are not isolated" in line]
    assert len(warnings) == 1 and "reach the network" in warnings[0], command
    assert command.document()["open"].startswith("sandboxes are not isolated")
    with LedgerReader(scene.out) as reader:
        assert [event.kind for event in reader.events()].count("sandbox.open") == 1
