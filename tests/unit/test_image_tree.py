"""A directory as a layer: every entry comes out as it went in, in the same bytes each time, or not at all."""

from __future__ import annotations

import gzip
import hashlib
import os
import socket
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from holdwater.core.errors import BadInput, ImageFailed
from holdwater.core.records import MiB
from holdwater.image.layer.tree import MTIME, identify, pack

PREFIX = "/opt/agent"
ROOT = os.geteuid() == 0
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")  # cap_net_raw=ep
LONGEST = 255


def furnish(tree: Path) -> None:
    """One of everything that a layer can hold."""
    tree.mkdir()
    (tree / "plain").write_text("plain\n")
    (tree / "empty").write_bytes(b"")
    (tree / "hollow").mkdir()
    (tree / "sticky").mkdir()
    (tree / "sticky").chmod(0o1777)
    (tree / "program").write_text("#!/bin/sh\n")
    (tree / "program").chmod(0o6755)
    (tree / "secret").write_text("s")
    (tree / "secret").chmod(0o400)
    (tree / "zz-second-name").hardlink_to(tree / "plain")
    (tree / "hollow-link").symlink_to("hollow")
    (tree / "sticky" / "up").symlink_to("../plain")
    (tree / "sticky" / "round").symlink_to("../sticky/../plain")
    (tree / "absolute").symlink_to(f"{PREFIX}/plain")
    (tree / "nowhere").symlink_to("not-there")
    os.mkfifo(tree / "pipe")
    with (tree / "sparse").open("wb") as file:
        file.seek(3 * MiB)
        file.write(b"end")
    (tree / "naïve-日本 \n'").write_text("unicode")
    Path(os.fsdecode(os.fsencode(tree) + b"/odd-\xff\xfe")).write_text("bytes")
    (tree / ("n" * LONGEST)).write_text("long")
    (tree / "l").symlink_to("n" * LONGEST)
    (tree / "above-100").mkdir()
    (tree / "above-100" / ("é" * 120)).write_text("long and not ASCII")
    (tree / "above-100" / "again").hardlink_to(tree / "above-100" / ("é" * 120))
    os.setxattr(tree / "plain", "user.note", b"kept\x00\xff")
    if ROOT:
        os.mknod(tree / "character", 0o640 | stat.S_IFCHR, os.makedev(1, 3))
        os.mknod(tree / "block", 0o600 | stat.S_IFBLK, os.makedev(7, 300))
        os.setxattr(tree / "program", "security.capability", CAPABILITY)


def survey(tree: Path) -> dict[str, tuple[object, ...]]:
    """What is to be the same of each entry: type and mode, device, link, content, xattrs and other names."""
    paths = [tree, *tree.rglob("*")]
    names: dict[int, list[str]] = {}
    for path in sorted(paths):
        names.setdefault(path.lstat().st_ino, []).append(str(path.relative_to(tree)))
    found: dict[str, tuple[object, ...]] = {}
    for path in paths:
        status = path.lstat()
        regular = stat.S_ISREG(status.st_mode)
        found[str(path.relative_to(tree))] = (
            status.st_mode,
            status.st_rdev,
            path.readlink() if path.is_symlink() else None,
            path.read_bytes() if regular else None,
            names[status.st_ino],
            {name: os.getxattr(path, name) for name in os.listxattr(path)} if regular else {},
        )
    return found


def packed(tree: Path, into: Path) -> Path:
    layer = pack(tree, PREFIX, into)
    content = into.read_bytes()
    assert layer.digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert layer.size == len(content)
    plain = gzip.decompress(content)
    assert layer.diff_id == f"sha256:{hashlib.sha256(plain).hexdigest()}" == identify(tree, PREFIX)
    assert layer.unpacked == len(plain)
    return into


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    furnish(tmp_path / "tree")
    return tmp_path / "tree"


def test_every_kind_of_entry_leaves_gnu_tar_unchanged(tree: Path, tmp_path: Path) -> None:
    archive = packed(tree, tmp_path / "layer.tar.gz")

    out = tmp_path / "out"
    out.mkdir()
    options = ["--xattrs", "--xattrs-include=*"] if ROOT else ["--xattrs"]
    subprocess.run(["tar", "-xpzf", archive, "-C", out, *options], check=True, env={"LC_ALL": "C"})

    assert survey(out / "opt/agent") == survey(tree)


def test_every_kind_of_entry_comes_out_of_tarfile_as_it_went_in(tree: Path, tmp_path: Path) -> None:
    archive = packed(tree, tmp_path / "layer.tar.gz")

    out = tmp_path / "out"
    with tarfile.open(archive) as tar:
        tar.extractall(out, filter="fully_trusted") if hasattr(tarfile, "data_filter") else tar.extractall(
            out
        )

    def without_xattrs(found: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
        return {name: entry[:-1] for name, entry in found.items()}  # `tarfile` knows none

    assert without_xattrs(survey(out / "opt/agent")) == without_xattrs(survey(tree))


def test_a_layer_holds_nothing_above_its_prefix_and_no_user_names(tree: Path, tmp_path: Path) -> None:
    with tarfile.open(packed(tree, tmp_path / "layer.tar.gz")) as tar:
        members = tar.getmembers()

    assert members[0].name == "opt/agent" and members[0].isdir()
    assert all(member.name.startswith("opt/agent") for member in members)
    assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {(0, 0, "", "", MTIME)}


def test_the_same_tree_gives_the_same_bytes_whenever_it_was_made(
    tmp_path: Path,
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for tree, order in ((one, range(20)), (other, reversed(range(20)))):
        tree.mkdir()
        for number in order:
            (tree / f"{number}").write_text("x" * number)
            os.utime(tree / f"{number}", (number, len(tree.name) * 1000))

    first, second = packed(one, tmp_path / "one.tar.gz"), packed(other, tmp_path / "other.tar.gz")

    assert first.read_bytes() == second.read_bytes()
    (other / "3").chmod(0o600)
    assert identify(one, PREFIX) != identify(other, PREFIX)


def test_a_path_beyond_the_limits_of_kernel_and_recursion_is_packed(tmp_path: Path) -> None:
    tree = tmp_path / "deep"
    tree.mkdir()
    fd = os.open(tree, os.O_RDONLY)
    names = ["d" * 250] * 20 + ["e"] * 1500
    try:
        for name in names:
            os.mkdir(name, dir_fd=fd)
            inner = os.open(name, os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = inner
        leaf = os.open("leaf", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
        os.write(leaf, b"found")
        os.close(leaf)
    finally:
        os.close(fd)

    with tarfile.open(packed(tree, tmp_path / "layer.tar.gz")) as tar:
        last = tar.getmembers()[-1]
        content = tar.extractfile(last)
        assert content is not None and content.read() == b"found"
    subprocess.run(["rm", "-rf", tree], check=True)  # what pytest removes with cannot

    assert last.name == "/".join(["opt/agent", *names, "leaf"])
    assert len(last.name) > 5000


@pytest.mark.parametrize(
    "target",
    ["/etc/passwd", "../x", "sub/../../x", "/opt/agent/../x", "/opt/agent-2/x", "/opt", "..", "top/.."],
)
def test_a_link_that_points_outside_is_refused_by_name(target: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "top").symlink_to(".")  # `top/..` stays inside as a text alone
    (tree / "sub" / "inner").mkdir()
    (tree / "bad-link").symlink_to(target)

    with pytest.raises(BadInput, match="`bad-link`"):
        pack(tree, PREFIX, tmp_path / "layer.tar.gz")


@pytest.mark.parametrize("name", [".wh.plain", ".wh..wh..opq"])
def test_a_name_that_would_delete_files_of_the_base_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / name).write_text("")

    with pytest.raises(BadInput, match=r"`\.wh\."):
        pack(tmp_path / "tree", PREFIX, tmp_path / "layer.tar.gz")


def test_a_socket_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "t" / "listener"))

    with pytest.raises(BadInput, match="`listener`"):
        pack(tmp_path / "t", PREFIX, tmp_path / "layer.tar.gz")


@pytest.mark.parametrize("size", [10 * MiB, 30 * MiB], ids=["shrinks", "grows"])
def test_a_file_that_changes_while_it_is_packed_is_an_error(size: int, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "moving").write_bytes(os.urandom(20 * MiB))
    into = tmp_path / "layer.tar.gz"
    looked = 0

    def change() -> None:
        nonlocal looked
        looked += 1
        if looked == 5:  # some megabytes are written by now
            os.truncate(tree / "moving", size)

    with pytest.raises(ImageFailed, match="changed while it was packed: `moving`"):
        pack(tree, PREFIX, into, change)


def test_an_entry_that_appears_while_its_directory_is_packed_is_an_error(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    furnish(tree)
    os.utime(tree, (1, 1))

    def change() -> None:
        (tree / "late").write_text("")

    with pytest.raises(ImageFailed, match="changed while it was packed"):
        pack(tree, PREFIX, tmp_path / "layer.tar.gz", change)


def test_memory_stays_flat_however_big_a_file_is(tmp_path: Path) -> None:
    script = """
import os, resource, sys
from pathlib import Path
from holdwater.image.layer.tree import identify
tree = Path(sys.argv[1])
identify(tree, "/opt/agent")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
os.truncate(tree / "big", 256 * 1024 * 1024)
identify(tree, "/opt/agent")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "big").write_bytes(bytes(4 * MiB))
    ran = subprocess.run([sys.executable, "-c", script, tmp_path / "tree"], capture_output=True, check=True)

    assert int(ran.stdout) < 8 * 1024  # KiB


@pytest.mark.parametrize("prefix", ["/", "opt/agent", "/opt/../agent", "/opt/agent/", "", "//opt"])
def test_a_prefix_that_is_no_place_is_refused(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="invalid prefix"):
        pack(tmp_path, prefix, tmp_path / "layer.tar.gz")
