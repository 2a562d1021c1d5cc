"""Copying into and out of a sandbox, and beginning anew: no link of an agent's leads anyone astray."""

from __future__ import annotations

import io
import os
import resource
import tarfile
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdwater.core.errors import SandboxFailed
from holdwater.core.records import Limits, MiB, Network, SandboxSpec
from holdwater.sandbox import process_marks
from holdwater.sandbox.probe import MachineFeatures, probe
from holdwater.sandbox.process import ProcessSandbox
from holdwater.sandbox.process_sandboxes import ProcessSandboxes
from holdwater.sandbox.tree_copy import unpack

RUN = f"moving test {os.getpid()}"


def machine(kind: str) -> MachineFeatures:
    if kind == "plain":
        return MachineFeatures(why_not="not wanted")
    if not probe().works:
        assert os.environ.get("CI") != "true"
        pytest.skip(f"bubblewrap does not work here: {probe().why_not}")
    return probe()


@pytest.fixture(params=["plain", "bubblewrap"])
async def box(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ProcessSandbox]:
    boxes = ProcessSandboxes(tmp_path / "scratch", RUN, Network.GATEWAY, machine=machine(request.param))
    async with boxes.open(1, Limits(), None) as sandbox:
        yield sandbox


async def test_a_tree_goes_in_and_comes_out_as_it_was(box: ProcessSandbox, tmp_path: Path) -> None:
    given = tmp_path / "given"
    (given / "deep" / "empty").mkdir(parents=True)
    (given / "deep" / "tool").write_bytes(b"#!/bin/sh\necho run\n")
    (given / "deep" / "tool").chmod(0o755)
    (given / "link").symlink_to("deep/tool")

    await box.put(given, f"{box.workdir}/there")
    ran = await box.run("there/link")
    await box.take("there", tmp_path / "back", exclude=["empty"])
    await box.take("there/deep/tool", tmp_path / "single")

    assert ran.stdout == "run\n"
    back = tmp_path / "back"
    assert (back / "link").readlink() == Path("deep/tool") and (back / "deep" / "tool").stat().st_mode & 0o111
    assert not (back / "deep" / "empty").exists()
    assert (tmp_path / "single").read_bytes() == (given / "deep" / "tool").read_bytes()


async def test_put_never_follows_a_link_of_the_agent(box: ProcessSandbox, tmp_path: Path) -> None:
    outside, given = tmp_path / "outside", tmp_path / "given"
    for place in (outside, given / "inner"):
        place.mkdir(parents=True)
    (given / "inner" / "test.sh").write_text("theirs")
    (given / "file").write_text("theirs")
    (outside / "kept").write_text("mine")
    await box.run(f"mkdir t; ln -s {outside} t/inner; ln -s {outside}/kept t/file")

    with pytest.raises(SandboxFailed):
        await box.put(given, "t")

    assert [path.name for path in outside.iterdir()] == ["kept"]
    assert (outside / "kept").read_text() == "mine"


@pytest.mark.parametrize(
    "made",
    [
        "ln -s /etc/passwd out/x",
        "ln -s ../../x out/x",
        "mkfifo out/x",
        "mkdir out/deep; ln -s . out/deep/same; ln -s deep/same/../../y out/x",
    ],
)
async def test_links_that_lead_out_and_pipes_are_left_out(
    box: ProcessSandbox, tmp_path: Path, made: str
) -> None:
    await box.run(f"mkdir out; echo fine > out/a; {made}")

    left_out = await box.take("out", tmp_path / "back")

    assert [one.path for one in left_out] == ["x"]
    assert (tmp_path / "back" / "a").read_text() == "fine\n"
    assert not os.path.lexists(tmp_path / "back" / "x")


async def test_a_link_is_judged_by_where_it_leads_on_disk(box: ProcessSandbox, tmp_path: Path) -> None:
    """Given links of which the text says one thing and the disk another."""
    up = "/".join([".."] * 16)
    await box.run(
        f"""
        mkdir -p out/a/b out/bin; echo x > out/bin/x
        ln -s ../.. out/a/b/up; ln -s a/b/up/{up}/etc/passwd out/escapes
        ln -s bin/../bin/x out/stays; ln -s a/b/up/bin/x out/through
        ln -s missing/../../etc out/dangles; ln -s missing/x out/broken
        ln -s second out/first; ln -s first out/second
        ln -P out/a/b/up out/hard
        """
    )

    left_out = await box.take("out", tmp_path / "back")

    back = tmp_path / "back"
    assert sorted(one.path for one in left_out) == ["dangles", "escapes", "first", "hard", "second"]
    assert [(back / name).read_text() for name in ("stays", "through")] == ["x\n", "x\n"]
    assert (back / "a/b/up").readlink() == Path("../..") and (back / "broken").is_symlink()
    for link in (path for path in back.rglob("*") if path.is_symlink()):
        assert link.resolve().is_relative_to(back), link


async def test_links_that_stay_inside_come_out_as_links(box: ProcessSandbox, tmp_path: Path) -> None:
    await box.run(
        'mkdir -p out/deep; echo x > out/a; ln -s "$PWD/out/a" out/deep/b; ln -s "$PWD/out" out/deep/c'
    )

    left_out = await box.take("out", tmp_path / "back")

    deep = tmp_path / "back" / "deep"
    assert left_out == ()
    assert ((deep / "b").readlink(), (deep / "c").readlink()) == (Path("../a"), Path(".."))


def member(name: str, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def packed(members: list[tarfile.TarInfo]) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for one in members:
            tar.addfile(one, io.BytesIO(bytes(one.size)))
    buffer.seek(0)
    return buffer


def shown(members: object) -> str | None:
    return f"{members[-1].name}-{members[-1].type.decode()}" if isinstance(members, list) else None


@pytest.mark.parametrize(
    "members",
    [[member("../x")], [member("/x")], [member("a/../../x")], [member("big", size=2000)]],
    ids=shown,
)
def test_an_archive_whose_names_lead_out_or_that_is_large_is_refused(
    tmp_path: Path, members: list[tarfile.TarInfo]
) -> None:
    with pytest.raises(SandboxFailed, match="cannot take out of the sandbox"):
        unpack(packed(members), tmp_path / "into", largest=1000)

    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "members",
    [
        [member("x", type=tarfile.SYMTYPE, linkname="/etc")],
        [member("a/x", type=tarfile.SYMTYPE, linkname="../../y")],
        [member("x", type=tarfile.LNKTYPE, linkname="/etc/passwd")],
        [member("x", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
        [member("x", type=tarfile.BLKTYPE)],
        [member("x", type=tarfile.FIFOTYPE)],
        [member("d", type=tarfile.SYMTYPE, linkname="e"), member("d/x")],
    ],
    ids=shown,
)
def test_members_of_an_archive_that_lead_out_are_left_out_alone(
    tmp_path: Path, members: list[tarfile.TarInfo]
) -> None:
    left_out = unpack(packed([*members, member("last")]), tmp_path / "into")

    assert [one.path for one in left_out] == [members[-1].name]
    assert (tmp_path / "into" / "last").is_file()
    assert not os.path.lexists(tmp_path / "x")


def test_a_hard_link_comes_out_as_one(tmp_path: Path) -> None:
    members = [member("out/a", size=3), member("out/b", type=tarfile.LNKTYPE, linkname="out/a")]

    left_out = unpack(packed(members), tmp_path / "into", strip=1)

    assert left_out == ()
    assert (tmp_path / "into" / "b").samefile(tmp_path / "into" / "a")


async def test_a_renewed_sandbox_has_nothing_of_the_old_one(box: ProcessSandbox) -> None:
    await box.write("old", "old")
    await box.run("setsid sleep 1000 >/dev/null 2>&1 &")

    await box.renew()

    assert process_marks.find_marked({process_marks.RUN: RUN}) == []
    assert (await box.run("ls -A")).stdout == ""


async def test_a_command_starts_in_the_given_directory(box: ProcessSandbox) -> None:
    await box.write("deep/down/file", "x")

    assert (await box.run("ls", workdir=f"{box.workdir}/deep/down")).stdout == "file\n"
    assert (await box.run(["ls"], workdir="deep")).stdout == "down\n"


async def test_directories_of_its_own_are_mounted_where_they_are_asked_for(tmp_path: Path) -> None:
    boxes = ProcessSandboxes(tmp_path / "scratch", RUN, Network.GATEWAY, machine=machine("bubblewrap"))
    start = SandboxSpec(directories=("/logs/verifier", "/tests"), env={"TOLD": "yes"})
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.sh").write_text("echo $TOLD >/logs/verifier/reward.txt; touch /elsewhere")
    async with boxes.open(1, Limits(), None, start) as box:
        await box.put(tmp_path / "tests", "/tests")
        result = await box.run("sh /tests/test.sh")

        assert "Read-only file system" in result.stderr
        assert await box.read("/logs/verifier/reward.txt") == b"yes\n"
        with pytest.raises(SandboxFailed, match="not below"):
            await box.read("/etc/passwd")


@pytest.mark.parametrize(
    ("start", "why"),
    [
        (SandboxSpec(processes=False), "its own image"),
        (SandboxSpec(user="agent"), "the user `agent`"),
        (SandboxSpec(directories=("/tests",)), "directories"),
    ],
)
async def test_what_only_a_container_gives_is_refused_with_a_hint(
    tmp_path: Path, start: SandboxSpec, why: str
) -> None:
    boxes = ProcessSandboxes(tmp_path / "scratch", RUN, Network.GATEWAY, machine=machine("plain"))
    async with boxes.open(1, Limits(), None, start) as box:
        with pytest.raises(SandboxFailed, match=why) as raised:
            await box.run("true")

    assert raised.value.hint == "`--sandbox docker`" and not raised.value.again


async def test_a_small_file_is_read_with_little_memory(box: ProcessSandbox) -> None:
    await box.write("small", "x")
    tracemalloc.start()
    try:
        assert await box.read("small") == b"x"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 4 * MiB


@pytest.mark.parametrize("name", ["tree", "tree/sparse"])
async def test_a_sparse_file_counts_before_any_of_it_is_written(
    box: ProcessSandbox, tmp_path: Path, name: str
) -> None:
    """Given a file of 40 GB that takes no disk, and a host that writes no file of that size."""
    await box.run("mkdir tree; echo small > tree/a; truncate -s 40G tree/sparse")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * MiB, before[1]))
    try:
        with pytest.raises(SandboxFailed, match="sparse`: too many files or bytes"):
            await box.take(name, tmp_path / "back")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
