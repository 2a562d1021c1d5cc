"""Remote sandboxes on another machine, behind TLS: the demo runs, and agents reach their gateway alone."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Scene, serving, until
from tests.machine_network import OtherMachine, other_machine
from tests.sandbox_server import ServedSandboxes, sandbox_server

from holdwater.sandbox.probe import probe

ATTACKS = Path(__file__).parents[1] / "escape_attacks.py"
MODEL = """
import asyncio
from holdwater.testing.scripted_model import ScriptedReply, serve_script

async def main():
    async with serve_script(lambda request: ScriptedReply(text="the reply of the model")) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
PROBE = """
import json, os, socket, sys, urllib.request
url, key, *places = sys.argv[1:]
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 300_000}]}).encode()
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
def ask(key):
    headers["Authorization"] = f"Bearer {key}"
    try:
        return urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)).read()
    except urllib.error.HTTPError as error:
        return error.code
reached = []
for place in places:
    host, port = place.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 1).close()
        reached.append(place)
    except OSError:
        pass
secrets = [path for path in (os.environ["TOKEN_FILE"], "/root/.ssh", "/etc/shadow") if os.path.exists(path)]
reply = json.loads(ask(key))["choices"][0]["message"]["content"]
print(json.dumps({"reached": reached, "reply": reply, "stranger": ask("wrong"), "files": secrets}))
"""
SUITE = """
import json
import holdwater as hw

def instances():
    yield hw.Instance(id="one", files={"probe.py": PROBE, "attacks.py": ATTACKS})

async def grade(instance, sandbox, answer):
    return True

async def solve(instance, sandbox, model):
    words = ["python3", "probe.py", model.sandbox_url, model.key, *PLACES]
    probed = await sandbox.run(words, env={"TOKEN_FILE": TOKEN_FILE})
    attacked = await sandbox.run(["python3", "attacks.py", HOST])
    return [probed.stdout + probed.stderr, attacked.stdout + attacked.stderr]

suite = hw.Suite(name="escape", instances=instances, grade=grade)
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[OtherMachine]:
    with other_machine(tmp_path / "tls") as found:
        yield found


@pytest.fixture
def server(tmp_path: Path, machine: OtherMachine) -> Iterator[ServedSandboxes]:
    words = ("--tls-cert", str(machine.certificate), "--tls-key", str(machine.key), "--client-grace", "2")
    with sandbox_server(tmp_path / "there", *words, before=machine.before, host=machine.address) as served:
        yield served


def test_the_demo_passes_on_another_machine_behind_tls(
    scene: Scene, server: ServedSandboxes, machine: OtherMachine
) -> None:
    words = ("run", "demo", "--out", str(scene.out), "--json", "--sandbox-ca", str(machine.certificate))
    command = scene.start(*words, *server.options())

    assert command.wait() == 0, command
    summary = command.document()
    assert summary["outcomes"] == {"passed": 14, "failed": 1} and summary["settled"] == 15
    scene.assert_whole(15)
    server.assert_clean()


def test_a_certificate_that_is_not_known_is_refused(
    scene: Scene, server: ServedSandboxes, machine: OtherMachine
) -> None:
    command = scene.start("run", "demo", "--out", str(scene.out), *server.options())

    assert command.wait() == 4
    assert "its certificate is refused: [SSL: CERTIFICATE_VERIFY_FAILED]" in command.stderr
    assert not scene.out.exists()


def test_a_wrong_token_is_refused_before_anything_is_made(
    scene: Scene, server: ServedSandboxes, machine: OtherMachine
) -> None:
    server.token.write_text("another token\n")
    words = ("run", "demo", "--out", str(scene.out), "--sandbox-ca", str(machine.certificate))
    command = scene.start(*words, *server.options())

    assert command.wait() == 4
    assert f"`{server.url}`: it does not accept the token" in command.stderr
    assert not scene.out.exists()


@pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true", reason="bubblewrap does not work here"
)
def test_an_agent_on_another_machine_reaches_the_gateway_and_nothing_else(
    scene: Scene, server: ServedSandboxes, machine: OtherMachine
) -> None:
    with serving("-c", MODEL) as url, socket.create_server((machine.near, 0)) as service:
        ports = [f"{host}:{port}" for host, port in _list_places(server, machine, service)]
        scene.suite(
            SUITE,
            PROBE=PROBE,
            ATTACKS=ATTACKS.read_text(),
            PLACES=ports,
            HOST=str(server.command.pid),
            TOKEN_FILE=str(server.token),
        )
        words = (*scene.agent(), "--model", "m", "--base-url", url, "--sandbox-ca", str(machine.certificate))
        command = scene.run(*words, *server.options())

        assert command.wait() == 0, command
    [row] = scene.export("attempts")
    probed, attacked = json.loads(row["answer"]) if isinstance(row["answer"], str) else row["answer"]
    found = json.loads(probed)
    assert found == {"reached": [], "reply": "the reply of the model", "stranger": 401, "files": []}
    assert json.loads(attacked) == []


@pytest.mark.proof
def test_a_cable_that_is_pulled_for_long_ends_the_sandboxes(
    scene: Scene, server: ServedSandboxes, machine: OtherMachine
) -> None:
    words = ("run", "demo", "--out", str(scene.out), "--json", "--sandbox-ca", str(machine.certificate))
    command = scene.start(*words, *server.options())
    until("a sandbox is open", lambda: len(server.sandboxes()) > 1)

    machine.cut()
    server.assert_clean()
    machine.heal()

    assert command.wait(120) == 0, command
    assert command.document()["outcomes"] == {"passed": 14, "failed": 1}
    scene.assert_whole(15)


def _list_places(
    server: ServedSandboxes, machine: OtherMachine, service: socket.socket
) -> Iterator[tuple[str, int]]:
    """Every way from a sandbox to the server, and to a service of the run's machine."""
    for host in ("127.0.0.1", "::1", machine.address, "host.docker.internal"):
        yield host, server.port
    yield machine.near, service.getsockname()[1]
    yield "127.0.0.1", service.getsockname()[1]
