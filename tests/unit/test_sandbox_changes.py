"""Keeping what changed in a directory, and putting it back."""

import io
import os
import shutil
import socket
import tarfile
import tempfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from holdwater.core.errors import SandboxFailed
from holdwater.sandbox import changes, salvage_archive

names = st.sampled_from(["a", "b", "b.c", "d e", "\u00e9", "a\n", "-x", "\udcff"])
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
kinds = st.one_of(
    st.binary(max_size=20),
    st.just(None),  # a directory
    st.sampled_from(["/etc/passwd", "../..", "a", "nowhere"]),  # a link
)
trees = st.lists(st.tuples(paths, kinds), max_size=8)
edits = st.lists(st.tuples(paths, st.one_of(kinds, st.just(...))), max_size=8)  # ...: delete


def put(root: Path, path: str, what: object) -> None:
    """Make, replace or delete a path; what stands in its way is removed."""
    place = root / path
    for parent in reversed(place.relative_to(root).parents):
        above = root / parent
        if above.is_symlink() or above.is_file():
            above.unlink()
        above.mkdir(exist_ok=True)
    if place.is_symlink() or place.is_file():
        place.unlink()
    elif place.is_dir():
        shutil.rmtree(place)
    if isinstance(what, bytes):
        place.write_bytes(what)
    elif isinstance(what, str):
        place.symlink_to(what)
    elif what is None:
        place.mkdir()


def seen(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


@settings(max_examples=100, deadline=None)
@given(trees, edits)
def test_what_changed_is_kept_and_put_back_on_a_fresh_copy(tree, edited):
    with tempfile.TemporaryDirectory() as place:
        work, fresh = Path(place, "work"), Path(place, "fresh")
        for root in (work, fresh):
            root.mkdir()
            for path, what in tree:
                put(root, path, what)
        changes.write_manifest(str(work), Path(place, "manifest"))
        for path, what in edited:
            put(work, path, what)

        kept = changes.salvage(str(work), Path(place, "manifest"), Path(place, "kept.tar.zst"))
        if kept:
            changes.restore(str(fresh), Path(place, "kept.tar.zst"))

        assert seen(fresh) == seen(work)


@pytest.fixture
def work(tmp_path):
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def keep(tmp_path, work):
    return lambda: changes.salvage(str(work), tmp_path / "manifest", tmp_path / "kept.tar.zst")


def members(archive: Path) -> dict[str, bytes]:
    content = zstandard.ZstdDecompressor().stream_reader(archive.open("rb"), closefd=True)
    with content, tarfile.open(fileobj=content, mode="r|") as tar:
        return {m.name: f.read() if (f := tar.extractfile(m)) else b"" for m in tar if not m.issym()}


def test_nothing_changed_is_nothing_kept(tmp_path, work, keep):
    (work / "old").write_text("x")
    changes.write_manifest(str(work), tmp_path / "manifest")

    assert keep() is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["manifest", "work"]


def test_a_new_mode_is_a_change_and_survives(tmp_path, work, keep):
    (work / "tool").write_text("x")
    changes.write_manifest(str(work), tmp_path / "manifest")
    (work / "tool").chmod(0o751)

    kept = keep()
    (work / "tool").chmod(0o600)
    changes.restore(str(work), tmp_path / "kept.tar.zst")

    assert kept is not None and kept.files == 1 and kept.name == "kept.tar.zst"
    assert kept.bytes == (tmp_path / "kept.tar.zst").stat().st_size
    assert (work / "tool").stat().st_mode & 0o777 == 0o751


def test_above_the_cap_small_files_are_kept_and_the_rest_is_named(tmp_path, work, keep, monkeypatch):
    monkeypatch.setattr(salvage_archive, "LARGEST", 100)
    for name, size in (("big", 80), ("one", 40), ("three", 40), ("two", 40), ("small", 5)):
        (work / name).write_bytes(b"x" * size)

    kept = keep()

    assert set(members(tmp_path / "kept.tar.zst")) == {"work/one", "work/three", "work/small", "left-out"}
    assert members(tmp_path / "kept.tar.zst")["left-out"] == b"big\0two\0"
    assert kept is not None and (kept.files, kept.left_out) == (3, 2)
    with pytest.raises(SandboxFailed, match="salvage is incomplete"):
        changes.restore(str(work), tmp_path / "kept.tar.zst")


def test_a_file_that_cannot_be_read_is_left_out(tmp_path, work, keep, monkeypatch):
    (work / "kept").write_text("x")
    (work / "gone").write_text("y")

    def fail(root: str, steps: list[str], flags: int) -> None:
        raise PermissionError if steps == ["gone"] else FileNotFoundError

    monkeypatch.setattr(changes.confined_paths, "open_file", fail)

    assert keep().left_out == 2


def test_the_name_of_a_salvage_is_synced_after_the_rename(tmp_path, work, keep, monkeypatch):
    synced: list[tuple[str, bool]] = []
    sync = os.fsync

    def watched(fd: int) -> None:
        sync(fd)
        synced.append((str(Path(f"/proc/self/fd/{fd}").readlink()), (tmp_path / "kept.tar.zst").exists()))

    monkeypatch.setattr(os, "fsync", watched)
    (work / "made").write_text("x")

    keep()

    assert synced == [(f"{tmp_path}/.kept.tar.zst.partial", False), (str(tmp_path), True)]


def test_sockets_and_pipes_are_left_alone(work, keep):
    os.mkfifo(work / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(work)  # the path of a socket is short
        listener.bind("socket")
        os.chdir(here)

    assert keep() is None


@pytest.mark.parametrize("name", ["work//etc/x", "work/../x", "work/a/../../x", "work/./x", "work/"])
def test_a_name_that_leads_out_is_refused(tmp_path, work, name):
    archive(tmp_path / "evil", tarfile.TarInfo(name))

    with pytest.raises(SandboxFailed):
        changes.restore(str(work), tmp_path / "evil")

    assert sorted(p.name for p in tmp_path.iterdir()) == ["evil", "work"]


def test_a_link_in_the_archive_is_not_followed(tmp_path, work):
    link, file = tarfile.TarInfo("work/out"), tarfile.TarInfo("work/out/x")
    link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
    archive(tmp_path / "evil", link, file)

    with pytest.raises(SandboxFailed):
        changes.restore(str(work), tmp_path / "evil")

    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.LNKTYPE])
def test_devices_pipes_and_hard_links_are_refused(tmp_path, work, kind):
    info = tarfile.TarInfo("work/x")
    info.type, info.linkname = kind, "/etc/passwd"
    archive(tmp_path / "evil", info)

    with pytest.raises(SandboxFailed):
        changes.restore(str(work), tmp_path / "evil")

    assert list(work.iterdir()) == []


def test_a_cut_archive_is_an_error(tmp_path, work, keep):
    (work / "x").write_bytes(os.urandom(5000))
    keep()
    kept = tmp_path / "kept.tar.zst"
    kept.write_bytes(kept.read_bytes()[:2000])

    with pytest.raises(SandboxFailed, match="cannot restore"):
        changes.restore(str(work), kept)


def archive(path: Path, *infos: tarfile.TarInfo) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for info in infos:
            tar.addfile(info)
    path.write_bytes(zstandard.compress(plain.getvalue()))
