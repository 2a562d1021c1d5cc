"""The files of an attempt: their paths, sizes, compression and removal, which the ledger records first.

`core.policy.keeps` decides which files are removed. In a row of `dropped` without `bytes` the deletion is
pending: if a process is stopped in between, the next one continues. During a run
`run/resources/retention.py` deletes files, for old runs `pruning.py`, which also compresses logs.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

import zstandard
from blake3 import blake3

from ..core.config import KeepRule
from ..core.records import KeptFile, Record, Verdict
from .directory import RunDirectory
from .durable_files import open_private, sync_directory
from .exchanges import segment_path
from .record_encoding import LEVEL

COMPRESSED_SUFFIX = ".zst"  # of a compressed log
TAKEN_OUT_SUFFIX = ".files"  # of a directory with files that a suite copied out of a sandbox
PIECE_SIZE = 1 << 20  # bytes of a file in memory at a time
STAT_BLOCK = 512  # the unit of `st_blocks` in bytes, independent of the file system's block size
DISK_BLOCK = 4096  # bytes: a file of at most this size takes one block, compressed or not
TEMPORARY_NAME = "squeezed.new"  # a fixed name is enough: one file is written at a time, under the run's lock


def log_path(directory: RunDirectory, attempt: int, name: str) -> Path:
    """Return the path of the log of the agent and the suite in an attempt at the instance `name`."""
    return directory.logs / f"{attempt:06d}-{slug(name)}.log"


def output_path(directory: RunDirectory, attempt: int, name: str) -> Path:
    """Return the path of the output of the attempt's commands."""
    return directory.logs / f"{attempt:06d}-{slug(name)}.out"


def salvage_path(directory: RunDirectory, attempt: int) -> Path:
    """Return the path of the archive of an attempt's work."""
    return directory.artifacts / f"{attempt:06d}.tar.zst"


def patch_path(directory: RunDirectory, attempt: int) -> Path:
    """Return the path of an attempt's work as a patch, which exists if the suite requests one."""
    return directory.artifacts / f"{attempt:06d}.patch"


def answer_path(directory: RunDirectory, attempt: int) -> Path:
    """Return the path of an answer, as JSON, that is too long for the ledger."""
    return directory.artifacts / f"{attempt:06d}.answer.json"


def read_answer_json(directory: RunDirectory, verdict: Verdict) -> str | None:
    """Return the answer of a verdict, a long one from its file; None if there is none or it is not kept."""
    if verdict.kept is None or verdict.kept.answer is None:
        return verdict.answer
    try:
        return (directory.artifacts / verdict.kept.answer.name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def describe_file(path: Path) -> KeptFile:
    """Return name, size and digest of a file in `artifacts/`. Reads the file: call it in a thread."""
    with path.open("rb") as file:
        digest = blake3()
        while piece := file.read(PIECE_SIZE):
            digest.update(piece)
        return KeptFile(name=path.name, bytes=file.tell(), digest=digest.hexdigest())


def check_file(path: Path, kept: KeptFile) -> str:
    """Return a description of the damage to a kept file; empty if it is intact. Reads the file."""
    try:
        found = describe_file(path)
    except OSError as error:
        return f"`{path.name}` cannot be read: {error.strerror}"
    if found.bytes != kept.bytes:
        return f"`{path.name}` has {found.bytes} bytes, {kept.bytes} were written"
    return f"`{path.name}` does not match its digest" if kept.digest not in ("", found.digest) else ""


def taken_out_path(directory: RunDirectory, attempt: int) -> Path:
    """Return the directory of the files that the suite copied out of an attempt's sandbox."""
    return directory.artifacts / f"{attempt:06d}{TAKEN_OUT_SUFFIX}"


def slug(name: str) -> str:
    """Return a file name that is recognisable as the id; runs of special characters become `_`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:48].strip(".") or "_"


def attempt_logs(directory: RunDirectory, attempt: int, name: str) -> tuple[Path, ...]:
    """Return the paths of an attempt's uncompressed logs, whether they exist or not."""
    return log_path(directory, attempt, name), output_path(directory, attempt, name)


def attempt_files(directory: RunDirectory, attempt: int, name: str) -> Iterator[Path]:
    """Yield the existing files of an attempt, without blobs: several attempts may share a blob."""
    logs = attempt_logs(directory, attempt, name)
    squeezed = (path.with_name(path.name + COMPRESSED_SUFFIX) for path in logs)
    work = (salvage_path, patch_path, answer_path, taken_out_path)
    made = (path(directory, attempt) for path in work)
    for path in (segment_path(directory, attempt), *made, *logs, *squeezed):
        if os.path.lexists(path):
            yield path


def remove(path: Path) -> int:
    """Remove a file, or a directory that a suite copied out; return the bytes freed, 0 if it is missing."""
    if path.suffix == TAKEN_OUT_SUFFIX and path.is_dir() and not path.is_symlink():
        freed = measure_tree(path)
        shutil.rmtree(path)
        return freed
    freed = measure_file(path)
    path.unlink(missing_ok=True)
    return freed


def measure_file(path: Path) -> int:
    """Return the bytes that a file takes on disk, 0 if it does not exist; links are not followed."""
    try:
        return path.lstat().st_blocks * STAT_BLOCK
    except FileNotFoundError:
        return 0


def measure_tree(path: Path) -> int:
    """Return the bytes that a directory and its contents take on disk."""
    total = measure_file(path)
    with os.scandir(path) as entries:
        for entry in entries:
            below = entry.is_dir(follow_symlinks=False)
            total += measure_tree(Path(entry.path)) if below else measure_file(Path(entry.path))
    return total


def is_regular_file(path: Path) -> bool:
    """Return whether the path is a regular file and not a link; False if it cannot be inspected."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


class RemovalResult(Record, frozen=True):
    """The result of deleting the files of some attempts."""

    freed: dict[int, int]  # attempt -> bytes
    failed: dict[int, str]  # attempt -> why some of its files remain


def drop_sample(connection: sqlite3.Connection, sample: tuple[int, int], keep: KeepRule, now: float) -> None:
    """Write that the files of a sample's settled attempts are dropped; the ledger keeps their rows."""
    connection.execute(
        "INSERT OR IGNORE INTO dropped (attempt, at, keep)"
        " SELECT id, ?, ? FROM attempt WHERE instance = ? AND sample = ? AND settled IS NOT NULL",
        (now, keep.value, *sample),
    )


def drop_attempts(
    connection: sqlite3.Connection, attempts: Iterable[int], keep: KeepRule, now: float
) -> None:
    """Write that the files of attempts are dropped, in a transaction of its own."""
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(
        "INSERT OR IGNORE INTO dropped (attempt, at, keep) VALUES (?, ?, ?)",
        ((attempt, now, keep.value) for attempt in attempts),
    )
    connection.execute("COMMIT")


def pending_deletions(connection: sqlite3.Connection, limit: int) -> list[tuple[int, str]]:
    """Return dropped attempts whose files may still exist, each with the name of its instance."""
    return connection.execute(
        "SELECT d.attempt, i.name FROM dropped d JOIN attempt a ON a.id = d.attempt"
        " JOIN instance i ON i.id = a.instance WHERE d.bytes IS NULL ORDER BY d.attempt LIMIT ?",
        (limit,),
    ).fetchall()


def record_deleted(connection: sqlite3.Connection, freed: Mapping[int, int]) -> None:
    """Write that the files of attempts are deleted."""
    connection.executemany(
        "UPDATE dropped SET bytes = ? WHERE attempt = ?",
        ((bytes_, attempt) for attempt, bytes_ in freed.items()),
    )


def remove_files(directory: RunDirectory, attempts: Iterable[tuple[int, str]]) -> RemovalResult:
    """Remove the files of dropped attempts. Blocks on the disk."""
    freed: dict[int, int] = {}
    failed: dict[int, str] = {}
    for attempt, name in attempts:
        try:
            freed[attempt] = sum(remove(path) for path in attempt_files(directory, attempt, name))
        except OSError as error:
            failed[attempt] = f"cannot remove `{error.filename}`: {error.strerror}"
    return RemovalResult(freed=freed, failed=failed)


def compress_log(path: Path) -> int:
    """Replace a file by its compressed form; return the bytes freed, 0 if the file stays as it is."""
    if not _is_worthwhile(path):
        return 0
    new = path.with_name(TEMPORARY_NAME)
    with path.open("rb") as source, open(new, "wb", opener=open_private) as target:
        zstandard.ZstdCompressor(level=LEVEL).copy_stream(source, target)
        target.flush()
        os.fsync(target.fileno())
    shutil.copystat(path, new)
    won = measure_file(path) - measure_file(new)
    if won <= 0:
        new.unlink()
        return 0
    new.replace(path.with_name(path.name + COMPRESSED_SUFFIX))
    path.unlink()
    sync_directory(path.parent)
    return won


def estimate_saving(path: Path) -> int:
    """Return roughly the bytes that `compress_log` would free, without writing anything."""
    if not _is_worthwhile(path):
        return 0
    sink = _ByteCounter()
    with path.open("rb") as source:
        zstandard.ZstdCompressor(level=LEVEL).copy_stream(source, cast(BinaryIO, sink))
    return max(0, measure_file(path) - -(-sink.bytes // DISK_BLOCK) * DISK_BLOCK)


def _is_worthwhile(path: Path) -> bool:
    return is_regular_file(path) and path.lstat().st_size > DISK_BLOCK


class _ByteCounter:
    """A write-only file that counts bytes and discards them."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, content: bytes) -> int:
        self.bytes += len(content)
        return len(content)
