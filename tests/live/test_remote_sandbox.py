"""A remote sandbox does the same as one of this machine: each scene plays in both, with equal results."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.sandbox_server import TOKEN, CutConnection
from tests.wait_bounds import stretch

from holdwater.core.authoring import ManagedSandbox, SandboxProvider
from holdwater.core.config import RunConfig
from holdwater.core.errors import AttemptInterrupted, AttemptOver, HoldwaterError
from holdwater.core.records import Limits, MiB, Network, SandboxSpec
from holdwater.core.sandbox_protocol import PutTree, SandboxCall, ServerAccess
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.durable_files import make_directory
from holdwater.run.setup.config import ProcessEnvironment
from holdwater.sandbox.probe import probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes
from holdwater.sandbox.remote.connection import RemoteConnection, ask_health
from holdwater.sandbox.remote.sandbox import RemoteSandboxes
from holdwater.serve import ServerSettings
from holdwater.serve.sandboxes.sandbox_host import SandboxHost
from holdwater.serve.sandboxes.sandbox_server import SandboxServer

LIMITS = Limits(memory=256 * MiB)
confined = pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true", reason=f"no bubblewrap: {probe().why_not}"
)


@asynccontextmanager
async def served(place: Path, grace: float = 0.5, **config: Any) -> AsyncIterator[SandboxServer]:
    """A sandbox server in this process."""
    directory = RunDirectory(place / "server")
    for folder in (directory.path, directory.scratch, directory.reserve, directory.logs):
        make_directory(folder)
    settings = RunConfig(
        id=f"s{os.getpid()}{place.name[-12:]}",
        suite="sandboxd",
        agent="sandboxd",
        created=0.0,
        version="0",
        workers=1,
        **config,
    )
    make_directory(directory.sandbox_root(settings))
    notes: list[str] = []
    host = SandboxHost(
        settings,
        directory,
        ProcessEnvironment(path=os.environ["PATH"]),
        lambda *note: notes.append(str(note)),
    )
    terms = ServerSettings(listen="127.0.0.1:0", keys=(TOKEN,))
    (place / "sockets").mkdir()
    async with host.open(), SandboxServer(host, terms, place / "sockets", grace) as server:
        yield server
    assert [note for note in notes if "failed" in note or "leftover" in note] == []


@asynccontextmanager
async def remote(place: Path) -> AsyncIterator[SandboxProvider]:
    async with served(place) as server:
        access = ServerAccess(url=server.address, token=TOKEN)
        async with RemoteConnection(access, reaches_gateway=True) as connection:
            sandboxes = RemoteSandboxes(connection, "run", Network.GATEWAY)
            yield sandboxes
            sandboxes.close()
        async with asyncio.timeout(stretch(10)):
            while (await ask_health(access)).sandboxes:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def near(place: Path) -> AsyncIterator[SandboxProvider]:
    sandboxes = ProcessSandboxes(place / "near", f"n{os.getpid()}{place.name[-12:]}", Network.GATEWAY)
    yield sandboxes
    sandboxes.close()
    sandboxes.threads.shutdown()


Scene = Callable[[ManagedSandbox, Path], Awaitable[Any]]


async def play_on_both(place: Path, scene: Scene, start: SandboxSpec = SandboxSpec()) -> Any:  # noqa: B008
    """What the scene returns, or raises, in a remote sandbox; it is the same in a sandbox of this machine."""
    found = []
    for kind in (near, remote):
        own = place / kind.__name__
        own.mkdir()
        async with AsyncExitStack() as stack:
            provider = await stack.enter_async_context(kind(own))
            box = await stack.enter_async_context(provider.open(7, LIMITS, None, start))
            try:
                found.append(await scene(box, own))
            except (OSError, HoldwaterError) as error:
                found.append((type(error).__name__, getattr(error, "kind", ""), str(error)))
    here, there = found
    assert there == here
    return there


async def test_a_command_has_its_streams_status_and_environment(tmp_path: Path) -> None:
    async def scene(box: ManagedSandbox, place: Path) -> Any:
        result = await box.run("echo out; echo err >&2; echo $WORD; pwd; exit 3", env={"WORD": "wörd"})
        words = await box.run(["printf", "%s|", "a b", "c"])
        late = await box.run("echo begun; sleep 60", timeout=stretch(0.1))
        return [msgspec.structs.replace(one, seconds=0.0) for one in (result, words, late)], box.workdir

    (result, words, late), workdir = await play_on_both(tmp_path, scene)

    assert (result.exit_code, result.stderr) == (3, "err\n")
    assert result.stdout == f"out\nwörd\n{workdir}\n"
    assert words.stdout == "a b|c|"
    assert late.timed_out and late.stdout == "begun\n"


async def test_output_is_bounded_and_logged_as_on_this_machine(tmp_path: Path) -> None:
    async def scene(box: ManagedSandbox, place: Path) -> Any:
        log = place / "logs" / "one.log"
        loud = await box.run("seq 100000; echo sk-hw-" + "k" * 43, log=log)
        await box.run("echo more", log=log)
        return loud.stdout, loud.truncated, log.read_bytes()

    out, truncated, log = await play_on_both(tmp_path, scene)

    assert truncated and "bytes left out" in out and len(out) < 70_000
    assert log.endswith(b"more\n") and b"k" * 43 not in log and b"\n99999\n" in log


async def test_files_and_trees_pass_in_both_directions(tmp_path: Path) -> None:
    source = tmp_path / "tree"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "big").write_bytes(os.urandom(3_000_000))
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "inside").symlink_to("deep/er/big")
    (source / "outside").symlink_to("/etc/hostname")

    async def scene(box: ManagedSandbox, place: Path) -> Any:
        await box.put(source, ".")
        await box.put(source / "run.sh", "single/copy.sh")
        await box.write("new/file", b"\0bytes")
        await box.write("text", "ünï")
        listed = await box.run(
            "./run.sh; ./single/copy.sh; readlink inside outside; cat text; wc -c < deep/er/big; ls"
        )
        skipped = await box.take(".", place / "taken", ["text"])
        await box.take("new/file", place / "one")
        taken = sorted(str(path.relative_to(place)) for path in (place / "taken").rglob("*"))
        big = (place / "taken/deep/er/big").read_bytes() == (source / "deep/er/big").read_bytes()
        return listed.output, [str(entry) for entry in skipped], taken, big, (place / "one").read_bytes()

    output, skipped, taken, big, single = await play_on_both(tmp_path, scene)

    assert output.startswith("ran\nran\ndeep/er/big\n/etc/hostname\nünï3000000\n")
    assert big and single == b"\0bytes"
    assert skipped == ["`outside`: a link that leads out, to `/etc/hostname`"]
    assert "taken/run.sh" in taken and "taken/text" not in taken


@pytest.mark.parametrize(
    "call",
    [
        lambda box: box.read("missing"),
        lambda box: box.read("/etc/passwd"),
        lambda box: box.read("."),
        lambda box: box.take("missing", Path("/nowhere/at/all")),
        lambda box: box.run(["no-such-program"]),
        lambda box: box.run("true", user="nobody"),
        lambda box: box.run("true", workdir="../../.."),
        lambda box: box.write("../out", "x"),
        lambda box: box.renew(SandboxSpec(user="agent")),
    ],
)
async def test_errors_are_those_of_a_sandbox_of_this_machine(tmp_path: Path, call: Any) -> None:
    async def scene(box: ManagedSandbox, place: Path) -> Any:
        await call(box)
        await box.run("true")

    kind, _, message = await play_on_both(tmp_path, scene)

    assert kind in ("FileNotFoundError", "IsADirectoryError", "SandboxFailed", "OSError"), message


async def test_work_is_marked_salvaged_and_restored(tmp_path: Path) -> None:
    async def scene(box: ManagedSandbox, place: Path) -> Any:
        assert await box.salvage(place / "nothing") is None
        await box.run("echo one > kept; echo old > changed; echo gone > deleted")
        await box.mark()
        await box.run("echo new > changed; rm deleted; seq 60000 > big; echo t > /tmp/t")
        kept = await box.salvage(place / "work.tar.zst")
        digest = (await box.run("cat big changed | md5sum")).stdout
        cleared = await box.clear_outside()
        await box.renew()
        await box.run("echo one > kept; echo old > changed; echo gone > deleted")
        await box.restore(place / "work.tar.zst")
        again = (await box.run("cat big changed | md5sum; ls . /tmp/t 2>/dev/null")).stdout
        assert kept is not None
        return (
            kept.name,
            kept.files,
            kept.left_out,
            again == digest + again[len(digest) :],
            again[-40:],
            cleared,
        )

    name, files, left_out, equal, listed, cleared = await play_on_both(tmp_path, scene)

    assert (name, files, left_out, equal, cleared) == ("work.tar.zst", 3, 0, True, True)
    assert "deleted" not in listed and not (tmp_path / "remote" / "nothing").exists()


async def test_processes_end_when_they_are_told_to(tmp_path: Path) -> None:
    async def scene(box: ManagedSandbox, place: Path) -> Any:
        idle = await box.end_processes()
        running = asyncio.ensure_future(box.run("touch begun; sleep 600"))
        async with asyncio.timeout(stretch(10)):
            while not (await box.run("test -e begun")).ok:
                await asyncio.sleep(0.01)
        ended = await box.end_processes()
        return idle, ended, (await running).ok

    assert await play_on_both(tmp_path, scene) == (False, True, False)


@confined
async def test_its_own_directories_and_networks_are_those_of_the_spec(tmp_path: Path) -> None:
    async def scene(box: ManagedSandbox, place: Path) -> Any:
        await box.write("/data/in/file", "x")
        shown = await box.run(
            "pwd; cat /data/in/file; ls /sys/class/net 2>/dev/null; cat /proc/net/dev | wc -l"
        )
        await box.set_network(Network.NONE)
        return shown.stdout, (await box.run("cat /proc/net/dev | wc -l")).stdout

    start = SandboxSpec(workdir="/app", directories=("/data/in",), env={"A": "b"})
    shown, _ = await play_on_both(tmp_path, scene, start)

    assert shown.startswith("/app\nx")


async def test_a_cancelled_command_is_killed_on_the_server(tmp_path: Path) -> None:
    async with remote(tmp_path) as provider, provider.open(1, LIMITS, None, SandboxSpec()) as box:
        running = asyncio.ensure_future(box.run("echo $$ > pid; exec sleep 600"))
        async with asyncio.timeout(stretch(10)):
            while not (await box.run("test -s pid")).ok:
                await asyncio.sleep(0.01)
            running.cancel()
            while (await box.run("echo /proc/[0-9]*/cmdline | grep -c sleep; pgrep sleep")).stdout.strip(
                "0\n"
            ):
                await asyncio.sleep(0.01)


async def test_use_of_memory_and_disk_is_not_of_this_machine(tmp_path: Path) -> None:
    async with remote(tmp_path) as provider, provider.open(1, LIMITS, None, SandboxSpec()) as box:
        await box.run("head -c 20000000 /dev/urandom > file; python3 -c 'x = bytes(50_000_000)'; sleep 0.1")
        await box.mark()

        assert box.peak_disk >= 20_000_000
        assert (box.memory, box.disk, box.cpu_seconds) == (0, 0, 0.0)


async def test_a_closed_sandbox_takes_no_more_calls(tmp_path: Path) -> None:
    async with remote(tmp_path) as provider:
        async with provider.open(1, LIMITS, None, SandboxSpec()) as box:
            await box.run("true")
        with pytest.raises(AttemptOver):
            await box.run("true")
        assert box.leftovers == []


async def test_another_client_cannot_use_a_sandbox_by_its_number(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        access = ServerAccess(url=server.address, token=TOKEN)
        async with (
            RemoteConnection(access, reaches_gateway=False) as one,
            RemoteConnection(access, reaches_gateway=False) as other,
        ):
            mine = RemoteSandboxes(one, "run", Network.GATEWAY)
            theirs = RemoteSandboxes(other, "run", Network.GATEWAY)
            async with mine.open(1, LIMITS, None, SandboxSpec()):
                stranger = theirs.open(1, LIMITS, None, SandboxSpec())
                stranger._session = await other.join_session()
                with pytest.raises(AttemptInterrupted, match="no such sandbox"):
                    await stranger.run("true")
            mine.close()
            theirs.close()


@confined
async def test_an_open_network_needs_a_server_that_gives_it(tmp_path: Path) -> None:
    async with remote(tmp_path) as provider:
        with pytest.raises(HoldwaterError, match="gives no sandbox the network `open`"):
            async with provider.open(1, LIMITS, None, SandboxSpec(network=Network.OPEN)):
                pass
        async with provider.open(2, LIMITS, None, SandboxSpec()) as box:
            with pytest.raises(HoldwaterError, match="gives no sandbox the network `open`"):
                await box.set_network(Network.OPEN)
            with pytest.raises(HoldwaterError, match="gives no sandbox the network `open`"):
                await box.renew(SandboxSpec(network=Network.OPEN))


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("trick", ["parent", "absolute", "through a link", "a link"])
async def test_a_tree_of_a_client_reaches_no_file_of_the_server(
    tmp_path: Path, trick: str, single: bool
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "secret").write_text("secret of the server")
    members = {
        "parent": [("../../../../victim/planted", b"", "")],
        "absolute": [(f"{victim}/planted", b"", "")],
        "through a link": [("link", None, str(victim)), ("link/planted", b"x", "")],
        "a link": [("single", None, str(victim / "secret")), ("way", None, str(victim / "secret"))],
    }[trick]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = (
                (tarfile.REGTYPE, "") if content is not None else (tarfile.SYMTYPE, target)
            )
            info.size = len(content or b"")
            tar.addfile(info, io.BytesIO(content or b""))

    async def send() -> AsyncIterator[bytes]:
        yield packed.getvalue()

    async with remote(tmp_path) as provider, provider.open(1, LIMITS, None, SandboxSpec()) as box:
        session = await provider.connection.join_session()  # type: ignore[attr-defined]
        call = SandboxCall(run="run", attempt=1, work=PutTree(path="in", single=single))
        with suppress(HoldwaterError, OSError):
            await session.call(call, send())
        seen = await box.run("cat in in/* in/*/* 2>/dev/null; true")

        assert "secret of the server" not in seen.stdout
    assert [path.name for path in victim.iterdir()] == ["secret"]


async def test_cuts_in_the_middle_of_a_tree_lose_no_byte(tmp_path: Path) -> None:
    content = os.urandom(12_000_000)
    (tmp_path / "big").write_bytes(content)
    async with served(tmp_path, grace=stretch(30)) as server:
        with CutConnection(int(server.address.rpartition(":")[2])) as proxy:
            access = ServerAccess(url=proxy.url, token=TOKEN)
            async with RemoteConnection(access, reaches_gateway=False) as connection:
                sandboxes = RemoteSandboxes(connection, "run", Network.GATEWAY)
                async with sandboxes.open(1, LIMITS, None, SandboxSpec()) as box:
                    for work in (box.put(tmp_path / "big", "big"), box.take("big", tmp_path / "back")):
                        passing, begun = asyncio.ensure_future(work), proxy.bytes
                        async with asyncio.timeout(stretch(30)):
                            for limit in (1_000_000, 5_000_000):
                                while proxy.bytes - begun < limit:
                                    await asyncio.sleep(0.001)
                                proxy.cut()
                                proxy.heal()
                            await passing
                sandboxes.close()

    assert proxy.passed == 5
    assert (tmp_path / "back").read_bytes() == content


async def test_a_sandbox_that_is_taken_back_interrupts_its_attempt(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        access = ServerAccess(url=server.address, token=TOKEN)
        async with RemoteConnection(access, reaches_gateway=False) as connection:
            sandboxes = RemoteSandboxes(connection, "run", Network.GATEWAY)
            async with sandboxes.open(1, LIMITS, None, SandboxSpec()) as box:
                running = asyncio.ensure_future(box.run("sleep 600"))
                async with asyncio.timeout(stretch(10)):
                    while not (await box.run("true")).ok:
                        await asyncio.sleep(0.01)
                [number] = server._host.places

                assert server._host._take_back_for_memory(number)
                assert not server._host._take_back_for_memory(number)

                for call in (running, box.read("file")):
                    with pytest.raises(AttemptInterrupted, match="memory was short") as raised:
                        await call
                    assert raised.value.kind == "preempted"
            sandboxes.close()
