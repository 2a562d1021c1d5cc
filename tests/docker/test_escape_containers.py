"""An agent in a container that tries every way out: the list of those that succeed is empty."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Scene, until
from tests.container_runs import IMAGE, Ground

NAME = "leak.holdwater.example"
SERVICE = """
import socket, threading
listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
print(listener.getsockname()[1], flush=True)
input()
"""
RESOLVER = """
import pathlib, socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
print(flush=True)
while True:
    query, client = server.recvfrom(4096)
    with open(sys.argv[1], "ab") as log:
        log.write(query.replace(b"\\x04", b".") + b"\\n")
    flags = bytes([query[2] | 0x80, 0x80])
    question = query[12:12 + query[12:].index(0) + 5]
    head = query[:2] + flags + bytes([0, 1, 0, 1, 0, 0, 0, 0])
    server.sendto(head + question + bytes([0xC0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 9]), client)
"""
PROBE = r"""
import ctypes, errno, json, os, socket, sys, time

url, port, name, *addresses = sys.argv[1:]
gateway = url.split("/")[2].split(":")[0]
libc = ctypes.CDLL(None, use_errno=True)
succeeded = []

def attempt(what, act):
    try:
        if act() is not False:
            succeeded.append(what)
    except (OSError, ValueError):
        pass

def connect(host):
    socket.create_connection((host, int(port)), 2).close()

def ask(server, kind):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    query = b"\x07\x07\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + labels + b"\x00\x00\x01\x00\x01"
    with socket.socket(socket.AF_INET, kind) as one:
        one.settimeout(5)
        one.connect((server, 53))
        one.send(query if kind == socket.SOCK_DGRAM else len(query).to_bytes(2, "big") + query)
        reply = one.recv(4096)
    return reply[-4:] == bytes([192, 0, 2, 9])

def call(number, *words):
    done = libc.syscall(number, *words) >= 0
    return done or ctypes.get_errno() not in (errno.EPERM, errno.EACCES, errno.ENOSYS)

def write(path):
    with open(path, "r+") as file:
        file.write(file.read() or "0")

def read(path):
    with open(path, "rb") as file:
        return bool(file.read(1))

attempt("resolve a name", lambda: socket.getaddrinfo(name, 80))
for server in ("127.0.0.11", gateway, "127.0.0.53", "127.0.0.1"):
    attempt(f"ask {server} by UDP", lambda: ask(server, socket.SOCK_DGRAM))
    attempt(f"ask {server} by TCP", lambda: ask(server, socket.SOCK_STREAM))
for host in (gateway, "198.51.100.1", "127.0.0.1", "::1", "host.docker.internal", *addresses):
    attempt(f"reach a service of the host at {host}", lambda: connect(host))
for row in open("/proc/net/if_inet6") if os.path.exists("/proc/net/if_inet6") else ():
    attempt(f"have an IPv6 address: {row.split()[0]}", lambda: row.split()[-1] != "lo")
for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock"):
    attempt(f"connect to {path}", lambda: socket.socket(socket.AF_UNIX).connect(path))
for path in ("kernel/core_pattern", "kernel/panic", "vm/drop_caches", "net/ipv4/ip_forward", "fs/file-max"):
    attempt(f"write /proc/sys/{path}", lambda: write(f"/proc/sys/{path}"))
attempt("write disable_ipv6", lambda: write("/proc/sys/net/ipv6/conf/all/disable_ipv6"))
attempt("open /proc/sysrq-trigger", lambda: open("/proc/sysrq-trigger", "w").close())
for path in ("/proc/kcore", "/dev/mem", "/dev/kmsg", "/proc/timer_list", "/sys/firmware/dmi/tables/DMI"):
    attempt(f"read {path}", lambda: read(path))
attempt("mount", lambda: libc.mount(b"none", b"/mnt", b"tmpfs", 0, None) == 0)
attempt("bind the root", lambda: libc.mount(b"/", b"/mnt", None, 4096, None) == 0)
attempt("unmount /proc/sys", lambda: libc.umount2(b"/proc/sys", 2) == 0)
attempt("have a user namespace", lambda: libc.unshare(0x10000000) == 0)
attempt("have a mount namespace", lambda: libc.unshare(0x00020000) == 0)
attempt("have a raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("have a packet socket", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 768))
attempt("have a raw IPv6 socket", lambda: socket.socket(socket.AF_INET6, socket.SOCK_RAW, 58))
attempt("make a device", lambda: os.mknod("/work/disk", 0o60600, os.makedev(7, 0)))
attempt("use the keyring", lambda: call(250, 0, -3, 0))
attempt("add a key", lambda: call(248, b"user", b"x", b"x", 1, -3))
attempt("load a BPF program", lambda: call(321, 5, ctypes.create_string_buffer(128), 128))
attempt("open a performance event", lambda: call(298, ctypes.create_string_buffer(128), 0, -1, -1, 0))
attempt("handle page faults", lambda: call(323, 0))
attempt("load a kernel", lambda: call(246, 0, 0, None, 0))
attempt("load a module", lambda: call(175, b"x", 1, b""))
attempt("set the clock", lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()))
attempt("reboot", lambda: call(169, 0xFEE1DEAD, 672274793, 0, None))
attempt("see the host's processes", lambda: len([p for p in os.listdir("/proc") if p.isdigit()]) > 20)
print(json.dumps({"succeeded": succeeded, "gateway": gateway}))
"""
SUITE = """
import asyncio, json, pathlib
import holdwater as hw


def instances():
    yield hw.Instance(id="prober", start=hw.SandboxSpec(workdir="/work"))


async def solve(instance, sandbox, model):
    await sandbox.write("probe.py", PROBE)
    rows = [row.split() for row in open("/proc/net/if_inet6")]
    words = [":".join(row[0][at:at + 4] for at in range(0, 32, 4)) for row in rows if row[-1] != "lo"]
    addresses = [f"{word}%eth0" if word.startswith("fe80") else word for word in words]
    result = await sandbox.run(
        ["python3", "probe.py", model.sandbox_url, SERVICE, NAME, *addresses], timeout=600
    )
    pathlib.Path(PLACE, "probed").write_text(json.dumps(addresses))
    while not pathlib.Path(PLACE, "go").exists():
        await asyncio.sleep(0.1)
    if not result.ok:
        raise hw.AgentFailed(result.output)
    return json.loads(result.stdout)


suite = hw.Suite(name="escape", instances=instances, grade=lambda instance, sandbox, answer: True)
"""
KNOCK = """
import socket, sys
for address in sys.argv[2:]:
    try:
        socket.create_connection((address, int(sys.argv[1])), 3).close()
        print("reached", address)
    except OSError as error:
        print("not", address, error)
"""


@pytest.fixture
def scene(tmp_path: Path, ground: Ground) -> Iterator[Scene]:
    found = ground.scene(tmp_path)
    yield found
    found.close()


@pytest.fixture
def service(ground: Ground) -> Iterator[int]:
    """A service of the host on all its addresses, of both protocols; its port."""
    for words in (
        ("ip", "link", "add", "outside", "type", "bridge"),
        ("ip", "addr", "add", "198.51.100.1/24", "dev", "outside"),
        ("ip", "-6", "addr", "add", "fd00:1234::1/64", "dev", "outside", "nodad"),
        ("ip", "link", "set", "outside", "up"),
    ):
        subprocess.run([*ground.before, *words], check=True)
    with started(ground, SERVICE) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()
    subprocess.run([*ground.before, "ip", "link", "del", "outside"], check=True)


@pytest.fixture
def asked(ground: Ground, tmp_path: Path) -> Iterator[Path]:
    """What the host's resolver, which listens on its loopback, was asked."""
    log = tmp_path / "queries"
    log.touch()
    with started(ground, RESOLVER, str(log)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield log
        process.kill()


def started(ground: Ground, code: str, *words: str) -> subprocess.Popen[bytes]:
    """A program of the host, in the daemon's network."""
    argv = [*ground.before, sys.executable, "-c", code, *words]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_no_way_out_of_a_container_succeeds(
    scene: Scene, ground: Ground, service: int, asked: Path, tmp_path: Path
) -> None:
    scene.suite(SUITE, PROBE=PROBE, SERVICE=str(service), NAME=NAME, PLACE=str(tmp_path))
    flags = ("--sandbox", "docker", "--image", IMAGE, "--model", "scripted", "--workers", "0")
    command = scene.run(*scene.agent(), *flags)
    until("the agent has tried", lambda: (tmp_path / "probed").exists() or not command.running, 120)
    knocked = knock_by_ipv6(ground, service, json.loads((tmp_path / "probed").read_text()))
    (tmp_path / "go").touch()

    assert command.wait(120) == 0, command
    (row,) = scene.export("attempts")
    told = json.loads(row["answer"])
    assert told["succeeded"] == []
    assert "reached" not in knocked, knocked
    assert asked.read_bytes() == b"", "a name left the gateway's network"
    ground.assert_clean()


def knock_by_ipv6(ground: Ground, port: int, addresses: list[str]) -> str:
    """What a container with IPv6 on the run's network reaches: no sandbox has any, a newer daemon's may."""
    (network,) = (name for name in ground.left()["networks"] if name.startswith("holdwater-"))
    assert any(address.startswith("fe80") for address in addresses), "the bridge has no IPv6 address"
    words = ["run", "--rm", "--network", network, "--sysctl", "net.ipv6.conf.all.disable_ipv6=0"]
    wait = 'sleep 3; exec python3 -c "$0" "$@"'  # until its address is known to be its own
    return ground.docker(*words, IMAGE, "sh", "-c", wait, KNOCK, str(port), *addresses)


def test_an_open_network_resolves_names_however_it_is_entered(
    scene: Scene, ground: Ground, asked: Path
) -> None:
    """Given sandboxes that are made on an open network, and the run's resolver on loopback."""
    suite = """
import holdwater as hw


def instances():
    yield hw.Instance(id="open", start=hw.SandboxSpec(workdir="/work", network=hw.Network.OPEN))
    yield hw.Instance(id="closed", start=hw.SandboxSpec(workdir="/work"))


async def solve(instance, sandbox, model):
    result = await sandbox.run(["python3", "-c", f"import socket; print(socket.gethostbyname('{NAME}'))"])
    return result.stdout.strip() or "no"


suite = hw.Suite(name="names", instances=instances, grade=lambda instance, sandbox, answer: True)
"""
    scene.suite(suite, NAME=NAME)

    command = scene.run(*scene.agent(), "--sandbox", "docker", "--image", IMAGE)

    assert command.wait(120) == 0, command
    answers = {row["instance"]: json.loads(row["answer"]) for row in scene.export("attempts")}
    assert answers == {"open": "192.0.2.9", "closed": "no"}
    assert asked.read_bytes().count(b"holdwater") >= 1
