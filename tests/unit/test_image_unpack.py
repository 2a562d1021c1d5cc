"""Layers on top of each other, below one path: whiteouts, links, and members that lead elsewhere."""

from __future__ import annotations

import os
import socket
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
import zstandard
from tests.registry_server import tar, zipped

from holdwater.core.errors import ImageFailed
from holdwater.image.registry.path_extraction import UnpackedTree


def info(kind: bytes, link: str = "", **more: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo()
    made.type, made.linkname = kind, link
    for name, value in more.items():
        setattr(made, name, value)
    return made


def symlink(to: str) -> tarfile.TarInfo:
    return info(tarfile.SYMTYPE, to)


def hard(to: str) -> tarfile.TarInfo:
    return info(tarfile.LNKTYPE, to)


def apply(tree: UnpackedTree, content: bytes) -> None:
    ours, theirs = socket.socketpair()

    def pour() -> None:
        with ours:
            try:
                ours.sendall(content)
            except OSError:
                pass  # the other side has given up

    pouring = threading.Thread(target=pour)
    pouring.start()
    try:
        tree.apply(theirs)
    finally:
        pouring.join()


def unpacked(into: Path, path: str, *layers: dict[str, Any]) -> dict[str, str]:
    """What lies in the directory in the end: relative path -> content, or `-> target`, or `/`."""
    into.mkdir()
    tree = UnpackedTree("image:1", path, into)
    for members in layers:
        apply(tree, zipped(tar(members)))
    tree.finish()
    return listed(into)


def listed(into: Path) -> dict[str, str]:
    found = {}
    for one in sorted(into.rglob("*")):
        name = str(one.relative_to(into))
        if one.is_symlink():
            found[name] = f"-> {one.readlink()}"
        else:
            found[name] = "/" if one.is_dir() else one.read_text() if one.is_file() else "special"
    return found


LOWER: dict[str, Any] = {
    "opt/": b"",
    "opt/agent/": b"",
    "opt/agent/run": b"one",
    "opt/agent/lib/": b"",
    "opt/agent/lib/a": b"a",
    "opt/agent/lib/b": b"b",
    "etc/passwd": b"root",
}


@pytest.mark.parametrize(
    ("upper", "expected"),
    [
        ({}, {"run": "one", "lib": "/", "lib/a": "a", "lib/b": "b"}),
        ({"opt/agent/run": b"two"}, {"run": "two", "lib": "/", "lib/a": "a", "lib/b": "b"}),
        ({"opt/agent/.wh.run": b""}, {"lib": "/", "lib/a": "a", "lib/b": "b"}),
        ({"opt/agent/.wh.lib": b""}, {"run": "one"}),
        (
            {"opt/agent/lib/.wh..wh..opq": b"", "opt/agent/lib/c": b"c"},
            {"run": "one", "lib": "/", "lib/c": "c"},
        ),
        (
            {"opt/agent/lib/c": b"c", "opt/agent/lib/.wh..wh..opq": b""},
            {"run": "one", "lib": "/", "lib/c": "c"},
        ),
        ({"opt/.wh..wh..opq": b"", "opt/agent/new": b"n"}, {"new": "n"}),
        ({"opt/agent/new": b"n", "opt/.wh.agent": b""}, {"new": "n"}),
        ({".wh.opt": b"", "opt/agent/new": b"n"}, {"new": "n"}),
        ({"opt/agent/lib": b"a file now"}, {"run": "one", "lib": "a file now"}),
        (
            {"opt/agent/run/": b"", "opt/agent/run/x": b"x"},
            {"run": "/", "run/x": "x", "lib": "/", "lib/a": "a", "lib/b": "b"},
        ),
        (
            {"opt/agent/.wh..wh.plnk": b"", "opt/agentish/x": b"x", "opt/.wh.agentish": b""},
            {"run": "one", "lib": "/", "lib/a": "a", "lib/b": "b"},
        ),
        ({"./opt/agent/lib/c": b"c", "/opt/agent/d": b"d", "opt/agent/.wh.lib/x": b"no whiteout"}, None),
    ],
)
def test_upper_layers_add_replace_and_take_away(
    tmp_path: Path, upper: dict[str, Any], expected: dict[str, str] | None
) -> None:
    found = unpacked(tmp_path / "into", "/opt/agent", LOWER, upper)
    if expected is None:
        assert found["lib/c"] == "c" and found["d"] == "d"
    else:
        assert found == expected


def test_modes_times_links_and_special_files_come_out_as_they_went_in(tmp_path: Path) -> None:
    script = info(tarfile.REGTYPE, mode=0o4751, mtime=12345)
    folder = info(tarfile.DIRTYPE, mode=0o500, mtime=777)
    members = {
        "opt/a/": b"",
        "opt/a/bin": folder,
        "opt/a/bin/run": script,
        "opt/a/hard": hard("opt/a/bin/run"),
        "opt/a/soft": symlink("/etc/passwd"),
        "opt/a/up": symlink("../../.."),
        "opt/a/pipe": info(tarfile.FIFOTYPE, mode=0o640),
        "opt/a/ä" + "x" * 200: b"long",
    }
    assert (
        unpacked(tmp_path / "into", "opt/a", members, {"opt/a/bin/late": b"late"})["soft"] == "-> /etc/passwd"
    )
    into = tmp_path / "into"
    found = (into / "bin/run").stat()
    assert (found.st_mode & 0o7777, found.st_mtime, found.st_nlink) == (0o4751, 12345, 2)
    assert ((into / "bin").stat().st_mode & 0o7777, (into / "bin").stat().st_mtime) == (0o500, 777)
    assert (into / "hard").samefile(into / "bin/run")
    assert (into / "pipe").is_fifo() and (into / "bin/late").read_text() == "late"


def test_a_path_may_be_a_file_or_the_whole_image(tmp_path: Path) -> None:
    assert unpacked(tmp_path / "one", "/opt/agent/run", LOWER, {"opt/agent/run": b"two"}) == {"run": "two"}
    assert unpacked(tmp_path / "two", "/", LOWER)["etc/passwd"] == "root"


@pytest.mark.parametrize(
    "pack", [lambda raw: raw, zipped, lambda raw: zipped(raw[:600]) + zipped(raw[600:]), zstandard.compress]
)
def test_a_layer_is_unpacked_however_it_is_packed(tmp_path: Path, pack: Any) -> None:
    tree = UnpackedTree("image:1", "etc", tmp_path)
    apply(tree, pack(tar(LOWER)))
    tree.finish()
    assert listed(tmp_path) == {"passwd": "root"}


@pytest.mark.parametrize(
    "members",
    [
        {"opt/agent/../../out": b"x"},
        {"../out": b"x"},
        {"opt/agent/link": symlink("../.."), "opt/agent/link/out": b"x"},
        {"opt/agent/link": symlink("/"), "opt/agent/link/sub/out": b"x"},
        {"opt/agent/.wh...": b""},
        {"opt/agent/lib/.wh...": b""},
        {"opt/agent/out": hard("opt/agent/../../../out")},
        {"opt/agent/link": symlink("../.."), "opt/agent/out": hard("opt/agent/link/before")},
        {"opt/agent": symlink("/somewhere"), "opt/agent/out": b"x"},
    ],
)
def test_a_member_that_would_leave_the_directory_is_refused(tmp_path: Path, members: dict[str, Any]) -> None:
    (tmp_path / "before").write_text("untouched")
    with pytest.raises(ImageFailed, match="would leave the directory") as caught:
        unpacked(tmp_path / "into", "/opt/agent", LOWER, members)
    assert (caught.value.kind, caught.value.again) == ("unsupported", False)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["before", "into"]
    assert (tmp_path / "before").read_text() == "untouched" and (tmp_path / "before").stat().st_nlink == 1


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"opt/agent/x": hard("etc/passwd")}, "hard link to a file outside of the path"),
        ({"opt/agent/x": hard("opt/agent/none")}, "hard link to a file that does not exist"),
        ({"opt/.wh.agent": b""}, "there is no such path"),
        ({"opt": symlink("/srv")}, "`/opt` is a link to `/srv`"),
        ({"opt/agent": symlink("/srv/agent")}, "`/opt/agent` is a link to `/srv/agent`"),
    ],
)
def test_what_cannot_be_taken_is_named(tmp_path: Path, members: dict[str, Any], why: str) -> None:
    with pytest.raises(ImageFailed, match=why) as caught:
        unpacked(tmp_path / "into", "/opt/agent", LOWER, members)
    assert "/opt/agent" in caught.value.message and "image:1" in caught.value.message


def test_an_invalid_archive_is_reported(tmp_path: Path) -> None:
    odd = tar({"opt/x": info(tarfile.REGTYPE, mtime=2**70)})
    for content in (odd, b"no tar" * 1000, zipped(tar(LOWER))[:-40], b"\x28\xb5\x2f\xfdxxxxxxxxxxx"):
        with pytest.raises(ImageFailed, match="not a tar archive"):
            apply(UnpackedTree("image:1", "/opt", tmp_path), content)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of others")
def test_owners_are_kept_by_root(tmp_path: Path) -> None:
    unpacked(tmp_path / "into", "/a", {"a/x": info(tarfile.REGTYPE, uid=1234, gid=4321, mode=0o600)})
    found = (tmp_path / "into/x").stat()
    assert (found.st_uid, found.st_gid) == (1234, 4321)
