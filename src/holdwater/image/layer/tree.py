"""Pack a directory as a layer: a gzipped tar, in one pass and constant memory, equal for equal content.

Owners and times are left out; everything else is kept. An entry that a layer cannot hold raises an error with
its name. `agent_layer.py` chooses the directory, and `cache.py` keeps the layer.
"""

from __future__ import annotations

import errno
import gzip
import os
import posixpath
import stat
import tarfile
from collections.abc import Callable
from hashlib import sha256
from io import FileIO
from pathlib import Path

from ...core.errors import BadInput, ImageFailed
from ...core.image import ImageLayer
from ...core.records import MiB
from .program import CancelCheck

MTIME = 315532800  # 1980: the earliest time of a zip archive
LEVEL = 6
CHUNK = 1 * MiB
BLOCK = tarfile.BLOCKSIZE
WHITEOUT = b".wh."
KEPT_XATTRS = ("user.", "security.capability")

Write = Callable[[bytes], object]


def pack(directory: Path, prefix: str, into: Path, check: CancelCheck = lambda: None) -> ImageLayer:
    """Write the layer that puts `directory` at `prefix` to the new file `into`. Blocks."""
    with into.open("xb") as file:
        packed = _DigestWriter(file.write)
        # Without name and time, the same tree gives the same bytes.
        with gzip.GzipFile("", "wb", LEVEL, _GzipSink(packed), mtime=0) as zipped:
            plain = _DigestWriter(zipped.write)
            _TreePacker(directory, prefix, plain, check).run()
        file.flush()
        os.fsync(file.fileno())
    return ImageLayer(
        digest=str(packed), diff_id=str(plain), size=packed.size, unpacked=plain.size, path=str(into)
    )


def identify(directory: Path, prefix: str, check: CancelCheck = lambda: None) -> str:
    """Return the `diff_id` that `pack` would compute, without writing a file. Blocks."""
    plain = _DigestWriter(len)
    _TreePacker(directory, prefix, plain, check).run()
    return str(plain)


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it is a valid directory for the agent's files; raise BadInput otherwise."""
    if prefix != posixpath.normpath("/" + prefix.lstrip("/")) or prefix == "/":
        raise BadInput(
            f"invalid prefix for the agent's files: `{prefix}`", "use an absolute path such as `/opt/agent`"
        )
    return prefix


class _DigestWriter:
    """Hashes and counts the bytes that pass through it."""

    def __init__(self, write: Write) -> None:
        self.size = 0
        self._write = write
        self._hash = sha256()

    def write(self, chunk: bytes) -> int:
        self.size += len(chunk)
        self._hash.update(chunk)
        self._write(chunk)
        return len(chunk)

    def __str__(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


class _GzipSink:
    """The part of a file's interface that gzip needs."""

    def __init__(self, digest: _DigestWriter) -> None:
        self.write = digest.write

    def flush(self) -> None:
        """Do nothing: the sink has no buffer."""


class _OpenDirectory:
    """A directory that the walk has entered: its remaining names, and the status that identifies it."""

    def __init__(self, fd: int, path: bytes) -> None:
        self.path = path  # below the tree's top, with a slash at the end; empty for the top
        self.status = os.fstat(fd)
        self.names = iter(sorted(map(os.fsencode, os.listdir(fd))))


class _TreePacker:
    """One pass over a tree.

    Every file is opened by its name relative to an open directory: a path may be longer than the kernel
    allows, and no link can redirect the walk. Only one directory is open at a time, as a tree may be deeper
    than the limit of open files. The walk returns by `..`, which must be the directory that it came from.
    """

    def __init__(self, directory: Path, prefix: str, out: _DigestWriter, check: CancelCheck) -> None:
        self._directory = directory
        self._prefix = os.fsencode(check_prefix(prefix))
        self._out = out
        self._check = check
        self._links: dict[tuple[int, int], bytes] = {}  # bound: the tree's files with several names

    def run(self) -> None:
        top = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._walk(top)
        finally:
            os.close(top)
        self._out.write(bytes(2 * BLOCK))

    def _walk(self, top: int) -> None:
        fd = os.dup(top)
        try:
            places = [_OpenDirectory(fd, b"")]
            self._enter(fd, places[0])
            while places:
                self._check()
                place = places[-1]
                name = next(place.names, None)
                if name is None:
                    fd = self._leave(fd, places)
                    continue
                with _EntryErrors(place.path + name):
                    inner = self._write_entry(fd, name, place.path, top)
                if inner is not None:
                    os.close(fd)
                    fd = inner
                    with _EntryErrors(place.path + name):
                        places.append(_OpenDirectory(fd, place.path + name + b"/"))
                        self._enter(fd, places[-1])
        finally:
            os.close(fd)

    def _leave(self, fd: int, places: list[_OpenDirectory]) -> int:
        """Return to the parent directory; return its file descriptor."""
        place = places.pop()
        with _EntryErrors(place.path):
            if _version(os.fstat(fd)) != _version(place.status):
                raise _changed_error(place.path)
            if not places:
                return fd
            above = _open_same(fd, b"..", os.O_RDONLY | os.O_DIRECTORY, places[-1].status, place.path)
            os.close(fd)
            return above

    def _enter(self, fd: int, place: _OpenDirectory) -> None:
        info = self._make_info(place.path.rstrip(b"/"), place.status, tarfile.DIRTYPE)
        self._write_header(info, _read_xattrs(fd))

    def _write_entry(self, fd: int, name: bytes, above: bytes, top: int) -> int | None:
        """Write one entry and return None; for a directory, write nothing and return its file descriptor."""
        path = above + name
        if name.startswith(WHITEOUT):
            raise _entry_error(path, "a name that begins with `.wh.` deletes files of the base")
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            return _open_same(fd, name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, status, path)
        if kind == stat.S_IFREG:
            self._write_file(fd, name, path, status)
        elif kind == stat.S_IFLNK:
            self._write_symlink(fd, name, path, status, top)
        else:
            self._write_special(path, status, kind)
        return None

    def _write_file(self, fd: int, name: bytes, path: bytes, status: os.stat_result) -> None:
        if status.st_nlink > 1:
            first = self._links.setdefault(_identity(status), path)
            if first != path:
                info = self._make_info(path, status, tarfile.LNKTYPE)
                info.linkname = self._member_name(first)
                self._write_header(info)
                return
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: a pipe may have replaced the file
        with FileIO(_open_same(fd, name, flags, status, path)) as file:
            info = self._make_info(path, status, tarfile.REGTYPE)
            info.size = status.st_size
            self._write_header(info, _read_xattrs(file.fileno()))
            self._write_content(file, status.st_size, path)
            if file.read(1) or _version(os.fstat(file.fileno())) != _version(status):
                raise _changed_error(path)

    def _write_content(self, file: FileIO, size: int, path: bytes) -> None:
        left = size
        while left:
            self._check()
            chunk = file.read(min(CHUNK, left))
            if not chunk:
                raise _changed_error(path)
            self._out.write(chunk)
            left -= len(chunk)
        self._out.write(bytes(-size % BLOCK))

    def _write_symlink(self, fd: int, name: bytes, path: bytes, status: os.stat_result, top: int) -> None:
        target = os.readlink(name, dir_fd=fd)
        lies = self._prefix + b"/" + posixpath.dirname(path)
        aims = (posixpath.normpath(posixpath.join(lies, target)), posixpath.join(lies, target))
        if not all(aim == self._prefix or aim.startswith(self._prefix + b"/") for aim in aims):
            raise _entry_error(path, f"its target is outside of the tree: `{_show_path(target)}`")
        start, rest = (top, target[len(self._prefix) :]) if target.startswith(b"/") else (fd, target)
        if _turns_behind_link(start, rest):
            raise _entry_error(path, f"its target goes through a link and up again: `{_show_path(target)}`")
        info = self._make_info(path, status, tarfile.SYMTYPE)
        info.linkname = os.fsdecode(target)
        self._write_header(info)

    def _write_special(self, path: bytes, status: os.stat_result, kind: int) -> None:
        types = {
            stat.S_IFIFO: tarfile.FIFOTYPE,
            stat.S_IFCHR: tarfile.CHRTYPE,
            stat.S_IFBLK: tarfile.BLKTYPE,
        }
        if kind not in types:
            raise _entry_error(path, "a socket cannot be in a layer")
        info = self._make_info(path, status, types[kind])
        if kind != stat.S_IFIFO:
            info.devmajor, info.devminor = os.major(status.st_rdev), os.minor(status.st_rdev)
        if kind == stat.S_IFCHR and status.st_rdev == 0:
            raise _entry_error(path, "a character device 0:0 deletes files of the base")
        self._write_header(info)

    def _make_info(self, path: bytes, status: os.stat_result, type_: bytes) -> tarfile.TarInfo:
        info = tarfile.TarInfo(self._member_name(path))
        info.type = type_
        info.mode = stat.S_IMODE(status.st_mode)
        info.mtime = MTIME
        return info

    def _member_name(self, path: bytes) -> str:
        return os.fsdecode((self._prefix + b"/" + path).strip(b"/"))

    def _write_header(self, info: tarfile.TarInfo, xattrs: dict[str, str] | None = None) -> None:
        info.pax_headers = xattrs or {}
        self._out.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))


class _EntryErrors:
    """Turns the system's errors about an entry into errors with the entry's name."""

    def __init__(self, path: bytes) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileNotFoundError):
            raise _changed_error(self._path) from error
        if isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise _changed_error(self._path) from error  # another kind of entry has the name now
        if isinstance(error, PermissionError):
            raise _entry_error(self._path, "permission denied") from error


def _open_same(fd: int, name: bytes, flags: int, status: os.stat_result, path: bytes) -> int:
    """Open the file and verify that it is the one that `status` describes."""
    opened = os.open(name, flags | os.O_CLOEXEC, dir_fd=fd)
    if _identity(os.fstat(opened)) != _identity(status):
        os.close(opened)
        raise _changed_error(path)
    return opened


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _version(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_size


def _read_xattrs(fd: int) -> dict[str, str]:
    try:
        names = sorted(name for name in os.listxattr(fd) if name.startswith(KEPT_XATTRS))
    except OSError as e:
        if e.errno == errno.ENOTSUP:
            return {}  # the file system has no extended attributes
        raise
    return {f"SCHILY.xattr.{name}": os.fsdecode(os.getxattr(fd, name)) for name in names}


def _turns_behind_link(start: int, target: bytes) -> bool:
    """Return whether a `..` of `target` follows a link, so that the target differs from its text."""
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    turns = [i for i, part in enumerate(parts) if part == b".."]
    fd = os.dup(start)
    try:
        for part in parts[: turns[-1]] if turns else ():
            if stat.S_ISLNK(os.stat(part, dir_fd=fd, follow_symlinks=False).st_mode):
                return True
            inner = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = inner
    except (FileNotFoundError, NotADirectoryError):
        return False  # a dangling link
    finally:
        os.close(fd)
    return False


def _show_path(path: bytes) -> str:
    """Return an external name in a form that is safe in a message."""
    return repr(os.fsdecode(path))[1:-1][:200]


def _entry_error(path: bytes, why: str) -> BadInput:
    return BadInput(f"`{_show_path(path)}` cannot be in a layer: {why}")


def _changed_error(path: bytes) -> ImageFailed:
    return ImageFailed(f"the tree changed while it was packed: `{_show_path(path) or '.'}`", kind="changed")
