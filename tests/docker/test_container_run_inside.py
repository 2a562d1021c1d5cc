"""What can be reached from inside a sandbox: the gateway, with its own key, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import Scene
from tests.container_runs import IMAGE, Ground

PROBE = r"""
import json, os, socket, sys, urllib.request, urllib.error

def reaches(host, port, seconds=1.5):
    try:
        socket.create_connection((host, int(port)), seconds).close()
        return True
    except OSError:
        return False

def answers(url, key):
    request = urllib.request.Request(url + "/models", headers={"Authorization": "Bearer " + key})
    try:
        return urllib.request.urlopen(request, timeout=300).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return str(error)

status = dict(line.split(":", 1) for line in open("/proc/self/status"))
url, key, other, elsewhere, neighbour = sys.argv[1:6]
gateway = url.split("/")[2].split(":")
told = {
    "gateway": answers(url, key),
    "another attempt's key": answers(url, other),
    "internet": reaches("192.0.2.1", 80) or reaches("1.1.1.1", 443),
    "a service of the machine at the gateway's address": reaches(gateway[0], elsewhere),
    "a service of the machine at another address": reaches("198.51.100.1", elsewhere),
    "another sandbox": reaches(neighbour, 8080),
    "docker's socket": any(os.path.exists(p) for p in ("/var/run/docker.sock", "/run/docker.sock")),
    "files of the machine": any(os.path.exists(p) for p in (HIDDEN, "/proc/1/root" + HIDDEN)),
    "devices": sorted(set(os.listdir("/dev")) & {"mem", "kmsg", "sda", "vda", "loop0"}),
    "privileges": status["NoNewPrivs"].strip(),
    "administrator": int(status["CapEff"], 16) >> 21 & 1,
}
print(json.dumps(told))
"""
SUITE = """
import asyncio, json
import holdwater as hw



def instances():
    yield hw.Instance(id="neighbour", start=hw.SandboxSpec(workdir="/work"))
    yield hw.Instance(id="prober", start=hw.SandboxSpec(workdir="/work"))


LISTEN = "import socket, time; s = socket.create_server(('0.0.0.0', 8080)); time.sleep(600)"
ADDRESS = "import socket; print(socket.gethostbyname(socket.gethostname()))"
state = {}


async def solve(instance, sandbox, model):
    if instance.id == "neighbour":
        state["address"] = (await sandbox.run(["python3", "-c", ADDRESS])).stdout.strip()
        state["key"] = model.key
        task = asyncio.ensure_future(sandbox.run(["python3", "-c", LISTEN], timeout=600))
        while "over" not in state:
            await asyncio.sleep(0.1)
        await sandbox.run("pkill python3")
        await task
        return None
    while "address" not in state:
        await asyncio.sleep(0.05)
    await asyncio.sleep(1)
    await sandbox.write("probe.py", PROBE)
    words = [model.sandbox_url, model.key, "hw-" + "0" * 40, ELSEWHERE, state["address"]]
    try:
        result = await sandbox.run(["python3", "probe.py", *words], timeout=600)
    finally:
        state["over"] = True
    if not result.ok:
        raise hw.AgentFailed(result.output)
    return json.loads(result.stdout)


suite = hw.Suite(name="inside", instances=instances, grade=lambda instance, sandbox, answer: True)
"""


@pytest.fixture
def scene(tmp_path: Path, ground: Ground) -> Iterator[Scene]:
    found = ground.scene(tmp_path)
    yield found
    found.close()


@pytest.fixture
def service(ground: Ground) -> Iterator[int]:
    """A service of the machine that listens on all its addresses, one of which is not on loopback."""
    subprocess.run([*ground.before, "ip", "link", "add", "outside", "type", "bridge"], check=True)
    subprocess.run([*ground.before, "ip", "addr", "add", "198.51.100.1/24", "dev", "outside"], check=True)
    subprocess.run([*ground.before, "ip", "link", "set", "outside", "up"], check=True)
    code = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen(
        [*ground.before, sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()
    subprocess.run([*ground.before, "ip", "link", "del", "outside"], check=True)


def test_a_sandbox_reaches_its_gateway_and_nothing_else(
    scene: Scene, ground: Ground, service: int, tmp_path: Path
) -> None:
    hidden = tmp_path / "hidden"
    hidden.write_text("secret")
    probe = PROBE.replace("HIDDEN", repr(str(hidden)))
    scene.suite(SUITE, PROBE=probe, ELSEWHERE=str(service))
    command = scene.run(
        *scene.agent(), "--sandbox", "docker", "--image", IMAGE, "--model", "scripted", "--workers", "0"
    )

    assert command.wait(90) == 0, command
    told = told_by(scene, "prober")
    assert told == {
        "gateway": 200,
        "another attempt's key": 401,
        "internet": False,
        "a service of the machine at the gateway's address": False,
        "a service of the machine at another address": False,
        "another sandbox": False,
        "docker's socket": False,
        "files of the machine": False,
        "devices": [],
        "privileges": "1",
        "administrator": 0,
    }
    ground.assert_clean()


def told_by(scene: Scene, name: str) -> dict[str, Any]:
    row = next(row for row in scene.export("attempts") if row["instance"] == name)
    found: dict[str, Any] = json.loads(row["answer"])
    return found
