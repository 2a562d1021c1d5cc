"""What a command in bubblewrap can see, write and reach."""

import asyncio
import os
import shutil
import socket
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.wait_bounds import stretch

from holdwater.core.config import Network
from holdwater.core.errors import SandboxFailed
from holdwater.core.records import Limits, MiB
from holdwater.sandbox.probe import list_findings, probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes, VisibilitySpec

RUN = f"run-{os.getpid()}"  # its control groups are no other process's
pytestmark = pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true",
    reason=f"bubblewrap does not work here: {probe().why_not}",
)


@pytest.fixture
def short(tmp_path):
    """A directory outside /tmp, which every sandbox has of its own, and short enough for a socket's path."""
    place = Path("/var/lib" if os.geteuid() == 0 else Path.home(), f"holdwater-test-{os.getpid()}")
    place.mkdir()
    yield place
    shutil.rmtree(place)


def opened(scratch: Path, network: Network = Network.GATEWAY, gateway=None, **given):
    boxes = ProcessSandboxes(scratch, RUN, network, machine=probe(), **given)
    return boxes.open(1, Limits(memory=512 * MiB), gateway)


def shown(*places: Path | str) -> VisibilitySpec:
    return VisibilitySpec(mounts=tuple((str(place), str(place)) for place in places))


async def test_the_host_cannot_be_written(tmp_path, short):
    async with opened(short / "scratch") as box:
        result = await box.run(f"touch {short}/x /x /etc/x /run/x /dev/shm/ok; touch /tmp/private")

        assert result.stderr.count("cannot touch") == 4
    assert not Path("/tmp/private").exists()


async def test_the_hosts_processes_cannot_be_seen(short):
    async with opened(short / "scratch") as box:
        result = await box.run("cat /proc/[0-9]*/comm | sort -u")

    assert set(result.stdout.split()) <= {"bwrap", "bash", "cat", "sort"}


async def test_the_hosts_environment_cannot_be_seen(short, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")

    async with opened(short / "scratch") as box:
        result = await box.run("cat /proc/[0-9]*/environ")

    assert f"HOLDWATER_RUN={RUN}" in result.stdout and "hunter2" not in result.stdout


async def test_it_has_no_capabilities(short):
    async with opened(short / "scratch") as box:
        result = await box.run("grep -E 'Cap(Eff|Prm|Bnd|Amb|Inh)' /proc/self/status; mount -o remount,rw /")

    held = {line.split()[1] for line in result.stdout.splitlines() if "CapBnd" not in line}
    assert held == {"0" * 16}
    assert not result.ok


async def test_other_sandboxes_the_run_and_hidden_places_cannot_be_seen(short):
    run, secret, file = short / "run", short / "secret", short / "key"
    for directory in (run / "scratch/2/work", secret):
        directory.mkdir(parents=True)
    (run / "ledger.db").write_text("truth")
    (secret / "key").write_text("hunter2")
    file.write_text("hunter2")

    async with opened(run / "scratch", hide=(run, secret, file), visible=shown(short)) as box:
        result = await box.run(
            f"find {short} -type f -size +0; ls {run} {run}/scratch {secret}; cat {file}; touch {run}/x"
        )
        await box.write("mine", "x")
        mine = await box.run("cat mine")

    assert "hunter2" not in result.stdout and "ledger" not in result.stdout
    assert result.stdout.split() == [f"{run}:", f"{secret}:"]
    assert "Read-only file system" in result.stderr and f"'{run}/scratch': No such file" in result.stderr
    assert mine.stdout == "x"


WHERE = 'printf "%s\\n" "$PWD" "$(pwd -P)" "$HOME" ~; ls -A . ~ /tmp'
WORK, HOME = "/run/holdwater/work", "/run/holdwater/home"


async def test_every_attempt_has_the_same_paths_and_sees_only_its_own_files(short):
    seen = []
    for run in ("one", "two"):
        boxes = ProcessSandboxes(short / run, run, Network.GATEWAY, machine=probe())
        async with boxes.open(1, Limits(), None) as first, boxes.open(2, Limits(), None) as second:
            await first.run("touch mine ~/mine /tmp/mine")
            seen += [second.workdir, (await second.run(WHERE)).stdout]
            environment = (await second.run("env")).stdout

    assert seen == 2 * [WORK, f"{WORK}\n{WORK}\n{HOME}\n{HOME}\n.:\n\n/run/holdwater/home:\n\n/tmp:\n"]
    assert str(short) not in environment


async def test_files_written_inside_are_found_from_outside_and_vice_versa(short):
    async with opened(short / "scratch") as box:
        await box.mark()
        await box.run(f"echo inside > {WORK}/a; mkdir d")
        await box.write(f"{WORK}/d/b", "outside")
        found = await box.run(f"cat d/b {WORK}/d/b")
        read = [await box.read(path) for path in ("a", f"{WORK}/a", f"{WORK}/d/../a", "../work/a")]
        kept = await box.salvage(short / "kept.tar.zst")

    assert found.stdout == 2 * "outside"
    assert read == 4 * [b"inside\n"]
    assert kept is not None and kept.files == 3


@pytest.mark.parametrize("path", [f"{HOME}/x", "/run/holdwater/x", "{host}/x", WORK, f"{WORK}x/x", "loop"])
async def test_a_path_outside_the_working_directory_as_seen_inside_is_refused(short, path):
    async with opened(short / "scratch") as box:
        await box.run("ln -s loop loop")
        for work in (box.read, lambda path: box.write(path, "x")):
            with pytest.raises((SandboxFailed, OSError), match=r"not below|Too many levels"):
                await work(path.format(host=short / "scratch/1/work"))

        assert sorted(file.name for file in (short / "scratch").rglob("*")) == [
            "1",
            "home",
            "loop",
            "private",
            "tmp",
            "work",
        ]


async def test_a_sandbox_sees_only_its_directories_and_a_read_only_gateway_path(short):
    look = (
        "ls -A /run /run/holdwater; touch /run/x /run/holdwater/x /run/holdwater/forwarder.pyc; touch ok ~/ok"
    )

    seen = []
    for socket_path in (None, make_socket(short / "gw.sock")):
        async with opened(short / "scratch", gateway=socket_path) as box:
            result = await box.run(look)
        seen.append(result.stdout.split())
        assert (result.ok, result.stderr.count("touch: ")) == (True, 3)

    plain = ["/run:", "holdwater", "/run/holdwater:"]
    own = ["home", "private", "work"]
    assert seen == [[*plain, *own], [*plain, "forwarder.pyc", "gateway.sock", *own]]


async def test_a_file_request_before_the_first_command_leaves_other_sandboxes_hidden(short):
    boxes = ProcessSandboxes(short / "scratch", RUN, Network.GATEWAY, machine=probe())
    async with boxes.open(1, Limits(), None) as first, boxes.open(2, Limits(), None) as second:
        with pytest.raises(FileNotFoundError):
            await first.read("x")
        await first.write("mine", "x")

        assert (await second.run(["ls", "-A", str(short / "scratch")])).stdout == ""


async def test_a_run_whose_own_files_lie_where_a_sandbox_has_its_own(short):
    """As in a sandbox within a sandbox: what is shown there must not stand in the way."""
    visible = shown("/run/holdwater/work", "/run/holdwater")
    boxes = ProcessSandboxes(short / "scratch", RUN, Network.GATEWAY, machine=probe(), visible=visible)
    async with boxes.open(1, Limits(), None) as box:
        assert (await box.run("pwd; touch x")).stdout == f"{WORK}\n"


async def test_the_loopback_of_the_host_cannot_be_reached(short):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        knock = [
            "python3",
            "-c",
            f"import socket; socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}))",
        ]

        outcomes = {}
        for network in Network:
            async with opened(short / "scratch", network) as box:
                outcomes[network] = (await box.run(knock)).ok

    assert outcomes == {Network.GATEWAY: False, Network.NONE: False, Network.OPEN: True}


@asynccontextmanager
async def gateway(path: Path, answer):
    server = await asyncio.start_unix_server(answer, path)
    async with server:
        yield path


async def echo_http(reader, writer):
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    body = await reader.readexactly(length)
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (len(body) + 3)
        + b"me "
        + body
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def echo_until_half_close(reader, writer):
    while chunk := await reader.read(65536):
        writer.write(chunk)
        await writer.drain()
    writer.write(b"end")
    writer.close()
    await writer.wait_closed()


async def test_the_gateway_is_reached_by_http_through_its_socket(short):
    boxes = ProcessSandboxes(short / "scratch", RUN, Network.GATEWAY, machine=probe())
    url = boxes.gateway_url("http://127.0.0.1:9999/v1")
    post = f"import urllib.request as u; print(u.urlopen('{url}/chat', data=b'hello').read().decode())"

    async with gateway(short / "gw.sock", echo_http) as path, boxes.open(1, Limits(), path) as box:
        result = await box.run(["python3", "-c", post], timeout=stretch(20))

    assert url == "http://127.0.0.1:4141/v1"
    assert (result.stdout, result.stderr) == ("me hello\n", "")


async def test_many_connections_at_once_with_large_bodies_and_half_closes(short):
    client = """
import socket, threading
def talk(i):
    with socket.create_connection(("127.0.0.1", 4141)) as s:
        def send():
            for _ in range(16): s.sendall(bytes([i]) * 65536)
            s.shutdown(socket.SHUT_WR)
        t = threading.Thread(target=send); t.start()
        got = b"".join(iter(lambda: s.recv(65536), b""))
        t.join()
        assert got == bytes([i]) * 65536 * 16 + b"end", len(got)
        done.append(i)
done = []
threads = [threading.Thread(target=talk, args=(i,)) for i in range(40)]
[t.start() for t in threads]; [t.join() for t in threads]
print(len(done))
"""
    async with (
        gateway(short / "gw.sock", echo_until_half_close) as path,
        opened(short / "scratch", gateway=path) as box,
    ):
        result = await box.run(["python3", "-c", client], timeout=stretch(60))

    assert (result.stdout, result.stderr) == ("40\n", "")


async def test_behind_the_forwarder_a_command_is_itself(short):
    """Its status, signals and children are its own; a gateway that is gone is a closed connection."""
    async with opened(short / "scratch", gateway=make_socket(short / "gone.sock")) as box:
        status = await box.run("exit 7")
        children = await box.run("cat /proc/$$/task/$$/children; echo; yes | head -n 1")
        signalled = await box.run("kill -9 $$")
        knock = await box.run("exec 3<>/dev/tcp/127.0.0.1/4141; cat <&3; echo closed", timeout=stretch(10))
        slow = await box.run("trap 'exit 5' TERM; while :; do sleep 0.1; done", timeout=stretch(0.5))

    assert status.exit_code == 7
    assert len(children.stdout.splitlines()[0].split()) == 1  # `cat` alone
    assert children.stdout.endswith("y\n") and children.stderr == ""
    assert signalled.exit_code == 137
    assert knock.stdout == "closed\n"
    assert (slow.timed_out, slow.exit_code) == (True, 5)


def make_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return path


def test_the_doctor_names_the_weaker_limits_without_it():
    with_it, without = list_findings(probe()), list_findings(type(probe())(why_not="it is not installed"))

    assert with_it[0].note == "" and "works" in with_it[0].value
    assert "not installed" in without[0].value and "install" in without[0].note
    assert "`none` is refused" in without[1].note
    assert "limits on sandboxes are weaker" in without[2].note


async def test_a_project_below_tmp_can_be_read_and_its_run_directory_cannot(tmp_path: Path) -> None:
    project = tmp_path / "project"
    run = project / "runs" / "one"
    (run / "scratch").mkdir(parents=True)
    (project / "agent.py").write_text("#!/usr/bin/env python3\nprint('found')")
    (project / "agent.py").chmod(0o755)
    (run / "ledger.db").write_text("truth")
    sandboxes = ProcessSandboxes(run / "scratch", RUN, Network.NONE, hide=(run,), visible=shown(project))

    async with sandboxes.open(1, Limits(), None) as sandbox:
        found = await sandbox.run([str(project / "agent.py")])
        written = await sandbox.run(f"echo > {project}/new")
        truth = await sandbox.run(["cat", str(run / "ledger.db")])

    assert found.stdout == "found\n"
    assert not written.ok and not truth.ok
