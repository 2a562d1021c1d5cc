"""Files into and out of a container, its work kept and put back, and a container begun anew."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zstandard
from tests.container_image import START, containers_of, sandboxes
from tests.docker_daemon import Daemon

from holdwater.core.errors import ImageFailed, ResourceExhausted, SandboxFailed
from holdwater.core.records import Limits, MiB, Network, SandboxSpec
from holdwater.sandbox.docker import container_work
from holdwater.sandbox.docker.sandbox import DockerSandbox
from holdwater.sandbox.docker.sandboxes import DockerSandboxes
from holdwater.sandbox.process_sandboxes import ProcessSandboxes

AGENT = SandboxSpec(image="box:1", user="agent")


@pytest.fixture
async def boxes(netdaemon: Daemon) -> AsyncIterator[DockerSandboxes]:
    async with sandboxes(netdaemon) as found:
        yield found


@pytest.fixture
async def box(boxes: DockerSandboxes) -> AsyncIterator[DockerSandbox]:
    async with boxes.open(1, Limits(), None, START) as found:
        yield found


async def test_files_are_written_read_and_shared_with_commands(boxes: DockerSandboxes) -> None:
    async with boxes.open(1, Limits(), None, AGENT) as box:
        await box.write("/home/agent/a/b/run", "#!/bin/sh\necho mine\n")
        made = await box.run(
            "ls -ld /home/agent/a /home/agent/a/b/run; chmod 755 a/b/run", workdir="/home/agent"
        )
        await box.write("/home/agent/a/b/run", b"#!/bin/sh\necho yours\n")
        ran = await box.run("echo new > a/c; /home/agent/a/b/run", workdir="/home/agent")
        read = await box.read("/home/agent/a/c")

    assert made.stdout.count(" agent agent ") == 2, made
    assert (ran.stdout, read) == ("yours\n", b"new\n")


async def test_links_are_followed_in_the_container(box: DockerSandbox) -> None:
    await box.run(
        "ln -s /etc/passwd one; ln -s one two; ln -s deep dir; ln -s three three; ln -s /nowhere lost"
    )
    await box.write("dir/down", "through a directory")
    await box.run("ln -s deep/down four")
    await box.write("four", "through a link")

    assert b"agent" in await box.read("two")
    assert await box.read("/work/deep/down") == b"through a link"
    assert (await box.run("ls -l four")).stdout.startswith("l")
    with pytest.raises(OSError, match="three"):
        await box.read("three")
    with pytest.raises(FileNotFoundError):
        await box.read("lost")


async def test_a_path_that_names_no_file_is_refused_or_reported_missing(box: DockerSandbox) -> None:
    await box.run("mkfifo pipe")

    for path in ("deep", "pipe", ""):
        with pytest.raises(SandboxFailed) as caught:
            await box.read(path)
        assert caught.value.kind == "path"
    with pytest.raises(FileNotFoundError, match="/work/no/such"):
        await box.read("no/such")
    with pytest.raises(NotADirectoryError):
        await box.write("here/below", "x")
    with pytest.raises(SandboxFailed):
        await box.write("deep", "x")


async def test_trees_are_copied_in_and_out(boxes: DockerSandboxes, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    (source / "deep").mkdir()
    (source / "deep" / "run").write_bytes(os.urandom(3_000_000))
    (source / "deep" / "run").chmod(0o755)
    (source / "link").symlink_to("deep/run")
    async with boxes.open(1, Limits(), None, AGENT) as box:
        await box.put(source, "/home/agent/in/there")
        await box.put(source / "deep" / "run", "/home/agent/one")
        listed = await box.run("ls -lA . in/there in/there/deep", workdir="/home/agent")
        await box.take("/home/agent/in", tmp_path / "out", exclude=["empty"])
        await box.take("/home/agent/one", tmp_path / "single")

    assert "root" not in listed.stdout
    content = (source / "deep" / "run").read_bytes()
    assert (tmp_path / "out" / "there" / "deep" / "run").read_bytes() == content
    assert (tmp_path / "out" / "there" / "deep" / "run").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "out" / "there" / "link").readlink() == Path("deep/run")
    assert not (tmp_path / "out" / "there" / "empty").exists()
    assert (tmp_path / "single").read_bytes() == content


@pytest.mark.parametrize(
    "wicked",
    ["ln -s /etc/passwd x/l", "ln -s ../../y x/l", "mkfifo x/p", "ln -s . x/d; mkfifo x/d/q"],
)
async def test_members_that_lead_out_and_devices_are_left_out_alone(
    box: DockerSandbox, tmp_path: Path, wicked: str
) -> None:
    await box.run(f"mkdir -p x; echo fine > x/a; {wicked}")

    left_out = await box.take("x", tmp_path / "out")

    assert len(left_out) == 1
    assert (tmp_path / "out" / "a").read_text() == "fine\n"
    assert {path.name for path in tmp_path.rglob("*")} <= {"out", "a", "d"}


async def test_links_that_stay_inside_come_out_as_links(box: DockerSandbox, tmp_path: Path) -> None:
    await box.run("mkdir -p x/y; echo fine > x/a; ln x/a x/hard; ln -s /work/x/a x/y/absolute")

    left_out = await box.take("x", tmp_path / "out")

    assert left_out == ()
    assert (tmp_path / "out" / "hard").samefile(tmp_path / "out" / "a")
    assert (tmp_path / "out" / "y" / "absolute").readlink() == Path("../a")


async def test_a_failed_copy_is_reported(box: DockerSandbox, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await box.take("not/there", tmp_path / "out")
    with pytest.raises(SandboxFailed, match="cannot copy"):
        await box.put(tmp_path / "not-here", "x")
    with pytest.raises(SandboxFailed):
        await box.put(Path(__file__), "/work/deep")
    assert (await box.run("cat here")).stdout == "in the image\n"


async def test_files_written_from_outside_count_against_the_quota(
    boxes: DockerSandboxes, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(bytes(3 * MiB))
    async with boxes.open(1, Limits(disk=2 * MiB), None, START) as box:
        with pytest.raises(ResourceExhausted):
            await box.write("a", bytes(3 * MiB))
        with pytest.raises(ResourceExhausted):
            await box.put(tmp_path, "there")
        await box.write("small", b"x")


async def test_work_is_salvaged_and_put_back_in_either_kind(boxes: DockerSandboxes, tmp_path: Path) -> None:
    kept = tmp_path / "kept.tar.zst"
    async with boxes.open(1, Limits(), None, START) as box:
        await box.write("given", "as it was")
        await box.write("changed", "1")
        await box.mark()
        await box.run("echo 2 > changed; rm -r deep; mkdir -p new; ln -s here new/link; echo n > new/file")
        salvage = await box.salvage(kept)
    assert salvage is not None
    names = _names(kept)
    assert names == {"work/changed", "work/new", "work/new/link", "work/new/file", "deleted"}

    async with boxes.open(2, Limits(), None, AGENT) as other:
        await other.restore(kept)
        told = await other.run("cat changed new/file; ls; ls -l new")
        assert told.stdout.startswith("2\nn\nchanged\nhere\nnew\n"), told
        assert "agent" in told.stdout
    processes = ProcessSandboxes(tmp_path / "scratch", f"files-{os.getpid()}", Network.OPEN)
    async with processes.open(1, Limits(), None) as third:
        await third.write("deep/gone", "x")
        await third.restore(kept)
        assert (await third.run("cat changed new/file; ls")).stdout == "2\nn\nchanged\nnew\n"
        await third.mark()
        await third.write("from", "a process")
        assert await third.salvage(tmp_path / "back.tar.zst") is not None
    processes.threads.shutdown()
    async with boxes.open(3, Limits(), None, START) as last:
        await last.restore(tmp_path / "back.tar.zst")
        assert await last.read("from") == b"a process"


async def test_nothing_that_changed_is_nothing_kept(boxes: DockerSandboxes, tmp_path: Path) -> None:
    async with boxes.open(1, Limits(), None, START) as box:
        await box.write("given", "as it was")
        await box.mark()
        await box.run("cat given; echo x > /tmp/elsewhere")
        assert await box.salvage(tmp_path / "kept") is None
    async with boxes.open(2, Limits(), None, START) as unused:
        await unused.mark()
        assert await unused.salvage(tmp_path / "kept") is None
    assert not (tmp_path / "kept").exists()


async def test_work_outside_the_working_directory_is_counted(boxes: DockerSandboxes, tmp_path: Path) -> None:
    async with boxes.open(1, Limits(), None, START) as box:
        await box.run("echo before > /etc/before")
        await box.mark()
        await box.run("echo x > /tmp/trace; mkdir -p /root/.cache; echo x > /root/.cache/trace")
        await box.salvage(tmp_path / "kept")
        traces = box.outside
        told = await box.run("mkdir -p /opt/site && echo x > /opt/site/page; rm /etc/before; echo x > here")
        assert told.ok, told
        await box.salvage(tmp_path / "kept")

        assert (traces, box.outside) == (0, 1)


@pytest.mark.parametrize("read_only", [False, True])
async def test_many_changes_are_found_in_one_reading_of_the_directory(
    netdaemon: Daemon, tmp_path: Path, read_only: bool
) -> None:
    kept, many = tmp_path / "kept", 2 * container_work.FEW
    async with (
        sandboxes(netdaemon, read_only=read_only) as boxes,
        boxes.open(1, Limits(), None, START) as box,
    ):
        await box.run(f"mkdir set; for i in $(seq {many}); do echo $i > set/$i; done")
        await box.mark()
        await box.run(f"echo other > set/7; rm set/9; for i in $(seq {many}); do echo $i > $i; done")
        salvage = await box.salvage(kept)

    names = _names(kept)
    assert salvage is not None
    assert {"work/set/7", "work/1", f"work/{many}", "deleted"} <= names
    assert not {"work/set/8", "work/here", "work/set/9"} & names
    assert len(names) == many + 2


@pytest.mark.parametrize("read_only", [False, True])
async def test_hard_links_are_kept_among_many_changes(
    netdaemon: Daemon, tmp_path: Path, read_only: bool
) -> None:
    kept, many = tmp_path / "kept", 2 * container_work.FEW
    async with sandboxes(netdaemon, read_only=read_only) as boxes:
        async with boxes.open(1, Limits(), None, START) as box:
            await box.run("echo before > before")
            await box.mark()
            await box.run(f"for i in $(seq {many}); do echo $i > $i; done; ln 7 also; ln before again")
            await box.salvage(kept)
        async with boxes.open(2, Limits(), None, START) as other:
            await other.restore(kept)
            told = await other.run("cat 7 also again")

    assert told.stdout == "7\n7\nbefore\n", told


async def test_of_too_much_work_the_smallest_files_are_kept(
    box: DockerSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdwater.sandbox.salvage_archive.LARGEST", 1_000_000)
    await box.mark()
    await box.run("for i in 1 2 3; do head -c ${i}00000 /dev/zero > f$i; done; head -c 900000 /dev/zero > f9")
    await box.salvage(tmp_path / "kept")

    assert _names(tmp_path / "kept") == {"work/f1", "work/f2", "work/f3", "left-out"}


async def test_begun_anew_nothing_is_left_and_the_start_may_be_another(
    netdaemon: Daemon, boxes: DockerSandboxes
) -> None:
    netdaemon.docker("tag", "box:1", "other:1")
    async with boxes.open(1, Limits(), None, START) as box:
        await box.run("echo x > mine; sleep 60 & exit 0")
        peak = box.peak_memory
        await box.renew()
        assert containers_of(netdaemon, boxes.containers.run) == []
        assert (await box.run("ls")).stdout == "deep\nhere\n"
        await box.renew(SandboxSpec(image="other:1", workdir="/tmp/place", user="agent", env={"A": "b"}))
        told = await box.run("id -u; pwd; echo $A")
        assert told.stdout == "1000\n/tmp/place\nb\n"
        assert len(containers_of(netdaemon, boxes.containers.run)) == 1
        assert box.peak_memory >= peak > 0
        with pytest.raises(ImageFailed):
            await box.renew(SandboxSpec(image="not:there"))


async def test_a_read_only_root_can_be_written_where_it_must(netdaemon: Daemon) -> None:
    start = SandboxSpec(image="box:1", user="agent", directories=("/logs/out",))
    async with sandboxes(netdaemon, read_only=True) as boxes, boxes.open(1, Limits(), None, start) as box:
        refused = await box.run("echo x > /etc/new || echo x > /home/agent/new")
        await box.write("from-outside", "in")
        allowed = await box.run("cat from-outside here; echo x > a; echo y > /logs/out/b; echo z > /tmp/c")
        assert await box.read("/logs/out/b") == b"y\n"
    volumes = netdaemon.docker("volume", "ls", "--quiet")

    assert (refused.ok, allowed.ok) == (False, True), allowed
    assert "Read-only file system" in refused.stderr
    assert allowed.stdout == "inin the image\n"
    assert volumes == ""


def _names(kept: Path) -> set[str]:
    with kept.open("rb") as file:
        content = zstandard.ZstdDecompressor().stream_reader(file).read()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return set(tar.getnames())


@pytest.mark.parametrize("read_only", [False, True])
async def test_the_private_directory_is_no_part_of_the_work(
    netdaemon: Daemon, tmp_path: Path, read_only: bool
) -> None:
    async with (
        sandboxes(netdaemon, read_only=read_only) as found,
        found.open(1, Limits(), None, START) as box,
    ):
        await box.run("echo work > made")
        await box.mark()
        await box.write(f"{box.private}/note", "for the agent")
        seen = await box.run(["cat", f"{box.private}/note"])
        kept = await box.salvage(tmp_path / "kept")

    assert (seen.stdout, kept) == ("for the agent", None)
