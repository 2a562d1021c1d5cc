"""A directory as a layer: a tar that is the same for the same content, gzipped, in one pass and flat memory.

Owners and times are left out, everything else comes out as it went in. What a layer cannot hold is refused by
name. Whose directory it is, and where the layer is kept, is `prepare.py`'s and `cache.py`'s part.
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
from ...core.image import Layer
from ...core.records import MiB
from .thread import Check

MTIME = 315532800  # 1980: a zip archive cannot say earlier
LEVEL = 6
CHUNK = 1 * MiB
BLOCK = tarfile.BLOCKSIZE
WHITEOUT = b".wh."
KEPT_XATTRS = ("user.", "security.capability")

Write = Callable[[bytes], object]


def pack(directory: Path, prefix: str, into: Path, check: Check = lambda: None) -> Layer:
    """Write `directory`, as it is to lie at `prefix`, to the new file `into`. Blocks."""
    with into.open("xb") as file:
        packed = _Digest(file.write)
        # No name and no time: the same bytes for the same tree.
        with gzip.GzipFile("", "wb", LEVEL, _Pipe(packed), mtime=0) as zipped:
            plain = _Digest(zipped.write)
            _Packing(directory, prefix, plain, check).run()
        file.flush()
        os.fsync(file.fileno())
    return Layer(
        digest=str(packed), diff_id=str(plain), size=packed.size, unpacked=plain.size, path=str(into)
    )


def identify(directory: Path, prefix: str, check: Check = lambda: None) -> str:
    """The `diff_id` that `pack` would give, without writing anything. Blocks."""
    plain = _Digest(len)
    _Packing(directory, prefix, plain, check).run()
    return str(plain)


def checked_prefix(prefix: str) -> str:
    """`prefix`, if a tree can lie there."""
    if prefix != posixpath.normpath("/" + prefix.lstrip("/")) or prefix == "/":
        raise BadInput(
            f"not a place for the agent's files: `{prefix}`", "an absolute path: `/opt/agent`, for example"
        )
    return prefix


class _Digest:
    """Hashes and counts what goes through it."""

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


class _Pipe:
    """As much of a file as gzip writes to."""

    def __init__(self, digest: _Digest) -> None:
        self.write = digest.write

    def flush(self) -> None:
        """Nothing is kept back here."""


class _Place:
    """A directory on the way down: its names that are still to come, and how to know it again."""

    def __init__(self, fd: int, path: bytes) -> None:
        self.path = path  # below the tree's top, with a slash at the end; empty for the top
        self.status = os.fstat(fd)
        self.names = iter(sorted(map(os.fsencode, os.listdir(fd))))


class _Packing:
    """One pass over a tree.

    Every file is opened by its name in a directory that is open: a path may be longer than the kernel takes,
    and no link leads elsewhere. Only one directory is open at a time, as a tree may be deeper than the number
    of open files; the way back up is `..`, and has to lead to where we came from.
    """

    def __init__(self, directory: Path, prefix: str, out: _Digest, check: Check) -> None:
        self._directory = directory
        self._prefix = os.fsencode(checked_prefix(prefix))
        self._out = out
        self._check = check
        self._links: dict[tuple[int, int], bytes] = {}  # bound: the tree's files that have more than one name

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
            places = [_Place(fd, b"")]
            self._enter(fd, places[0])
            while places:
                self._check()
                place = places[-1]
                name = next(place.names, None)
                if name is None:
                    fd = self._leave(fd, places)
                    continue
                with _naming(place.path + name):
                    inner = self._entry(fd, name, place.path, top)
                if inner is not None:
                    os.close(fd)
                    fd = inner
                    with _naming(place.path + name):
                        places.append(_Place(fd, place.path + name + b"/"))
                        self._enter(fd, places[-1])
        finally:
            os.close(fd)

    def _leave(self, fd: int, places: list[_Place]) -> int:
        """Up again, with the directory that is open then."""
        place = places.pop()
        with _naming(place.path):
            if _version(os.fstat(fd)) != _version(place.status):
                raise _changed(place.path)
            if not places:
                return fd
            above = _opened(fd, b"..", os.O_RDONLY | os.O_DIRECTORY, places[-1].status, place.path)
            os.close(fd)
            return above

    def _enter(self, fd: int, place: _Place) -> None:
        info = self._info(place.path.rstrip(b"/"), place.status, tarfile.DIRTYPE)
        self._header(info, _xattrs(fd))

    def _entry(self, fd: int, name: bytes, above: bytes, top: int) -> int | None:
        """Write one entry; of a directory nothing yet, it is opened in place of that."""
        path = above + name
        if name.startswith(WHITEOUT):
            raise _refused(path, "a name that begins with `.wh.` deletes files of the base")
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            return _opened(fd, name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, status, path)
        if kind == stat.S_IFREG:
            self._file(fd, name, path, status)
        elif kind == stat.S_IFLNK:
            self._symlink(fd, name, path, status, top)
        else:
            self._special(path, status, kind)
        return None

    def _file(self, fd: int, name: bytes, path: bytes, status: os.stat_result) -> None:
        if status.st_nlink > 1:
            first = self._links.setdefault(_identity(status), path)
            if first != path:
                info = self._info(path, status, tarfile.LNKTYPE)
                info.linkname = self._name(first)
                self._header(info)
                return
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # the last for a pipe that takes its place
        with FileIO(_opened(fd, name, flags, status, path)) as file:
            info = self._info(path, status, tarfile.REGTYPE)
            info.size = status.st_size
            self._header(info, _xattrs(file.fileno()))
            self._content(file, status.st_size, path)
            if file.read(1) or _version(os.fstat(file.fileno())) != _version(status):
                raise _changed(path)

    def _content(self, file: FileIO, size: int, path: bytes) -> None:
        left = size
        while left:
            self._check()
            chunk = file.read(min(CHUNK, left))
            if not chunk:
                raise _changed(path)
            self._out.write(chunk)
            left -= len(chunk)
        self._out.write(bytes(-size % BLOCK))

    def _symlink(self, fd: int, name: bytes, path: bytes, status: os.stat_result, top: int) -> None:
        target = os.readlink(name, dir_fd=fd)
        lies = self._prefix + b"/" + posixpath.dirname(path)
        aims = (posixpath.normpath(posixpath.join(lies, target)), posixpath.join(lies, target))
        if not all(aim == self._prefix or aim.startswith(self._prefix + b"/") for aim in aims):
            raise _refused(path, f"its target is outside of the tree: `{_shown(target)}`")
        start, rest = (top, target[len(self._prefix) :]) if target.startswith(b"/") else (fd, target)
        if _turns_behind_link(start, rest):
            raise _refused(path, f"its target leads through a link and up again: `{_shown(target)}`")
        info = self._info(path, status, tarfile.SYMTYPE)
        info.linkname = os.fsdecode(target)
        self._header(info)

    def _special(self, path: bytes, status: os.stat_result, kind: int) -> None:
        types = {
            stat.S_IFIFO: tarfile.FIFOTYPE,
            stat.S_IFCHR: tarfile.CHRTYPE,
            stat.S_IFBLK: tarfile.BLKTYPE,
        }
        if kind not in types:
            raise _refused(path, "a socket cannot be in a layer")
        info = self._info(path, status, types[kind])
        if kind != stat.S_IFIFO:
            info.devmajor, info.devminor = os.major(status.st_rdev), os.minor(status.st_rdev)
        if kind == stat.S_IFCHR and status.st_rdev == 0:
            raise _refused(path, "a character device 0:0 deletes files of the base")
        self._header(info)

    def _info(self, path: bytes, status: os.stat_result, type_: bytes) -> tarfile.TarInfo:
        info = tarfile.TarInfo(self._name(path))
        info.type = type_
        info.mode = stat.S_IMODE(status.st_mode)
        info.mtime = MTIME
        return info

    def _name(self, path: bytes) -> str:
        return os.fsdecode((self._prefix + b"/" + path).strip(b"/"))

    def _header(self, info: tarfile.TarInfo, xattrs: dict[str, str] | None = None) -> None:
        info.pax_headers = xattrs or {}
        self._out.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))


class _naming:
    """What the system says about an entry, with its name."""

    def __init__(self, path: bytes) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileNotFoundError):
            raise _changed(self._path) from error
        if isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise _changed(self._path) from error  # something else has its name by now
        if isinstance(error, PermissionError):
            raise _refused(self._path, "it may not be read") from error


def _opened(fd: int, name: bytes, flags: int, status: os.stat_result, path: bytes) -> int:
    """The very file that `status` is of."""
    opened = os.open(name, flags | os.O_CLOEXEC, dir_fd=fd)
    if _identity(os.fstat(opened)) != _identity(status):
        os.close(opened)
        raise _changed(path)
    return opened


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _version(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_size


def _xattrs(fd: int) -> dict[str, str]:
    try:
        names = sorted(name for name in os.listxattr(fd) if name.startswith(KEPT_XATTRS))
    except OSError as e:
        if e.errno == errno.ENOTSUP:
            return {}  # a file system that has none
        raise
    return {f"SCHILY.xattr.{name}": os.fsdecode(os.getxattr(fd, name)) for name in names}


def _turns_behind_link(start: int, target: bytes) -> bool:
    """Whether a `..` of `target` follows a link, so that it leads elsewhere than its text says."""
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
        return False  # it leads nowhere
    finally:
        os.close(fd)
    return False


def _shown(path: bytes) -> str:
    """A name from outside as it can stand in a message."""
    return repr(os.fsdecode(path))[1:-1][:200]


def _refused(path: bytes, why: str) -> BadInput:
    return BadInput(f"`{_shown(path)}` cannot be in a layer: {why}")


def _changed(path: bytes) -> ImageFailed:
    return ImageFailed(f"the tree changed while it was packed: `{_shown(path) or '.'}`", kind="changed")
