"""Writes the conversation of an attempt to an archive, as OpenHands' SDK keeps it, and copies the logs.

The archive has a file for each event and the state of the conversation. It is written event by event; in the
state, the agent's model and tools are as far as the record has them.
"""

from __future__ import annotations

import gzip
import io
import re
import shutil
import tarfile
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import zstandard
from blake3 import blake3

from ..core.config import RunConfig
from ..ledger.attempt_files import COMPRESSED_SUFFIX, log_path, output_path
from ..ledger.reader import LedgerReader
from ..ledger.rows import AttemptRow
from .openhands_events import encode_json
from .samples import ExportedSample

LONGEST_NAME = 180  # characters of an id that are used in a file name
WORK_DIRECTORY = "/workspace"


def name_file(instance: str) -> str:
    """Return the id itself if it is a plain file name; otherwise its plain characters and a digest."""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", instance) and len(instance) <= LONGEST_NAME:
        return instance
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", instance)[:LONGEST_NAME].lstrip(".-")
    return f"{plain}-{blake3(instance.encode()).hexdigest()[:8]}"


class ConversationArchive:
    """The file `<instance>.tar.gz`, complete when its `with` block ends."""

    def __init__(self, directory: Path, sample: ExportedSample, config: RunConfig) -> None:
        self._path = directory / f"{name_file(sample.outcome.instance)}.tar.gz"
        self._model = config.model or "none"
        self._id = uuid.uuid5(uuid.NAMESPACE_OID, f"{config.id}-{sample.row.attempt}")
        self._time = int(sample.row.started)
        self._count = 0
        self._stack = ExitStack()

    def __enter__(self) -> ConversationArchive:
        file = self._stack.enter_context(self._path.open("wb"))
        packed = self._stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=self._time))
        self._tar = self._stack.enter_context(tarfile.open(fileobj=packed, mode="w|"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def add_event(self, event: str, content: bytes) -> None:
        self._add(f"events/event-{self._count:05d}-{event}.json", content)
        self._count += 1

    def add_state(self, metrics: dict[str, Any], tools: Sequence[str], *, is_finished: bool) -> None:
        """Add the state: model, tools, usage, and whether the agent has finished."""
        agent = {
            "kind": "Agent",
            "llm": {"model": self._model, "usage_id": "agent"},
            "tools": [{"name": name} for name in tools if name not in ("finish", "think")],
        }
        state = {
            "id": str(self._id),
            "agent": agent,
            "workspace": {"kind": "LocalWorkspace", "working_dir": WORK_DIRECTORY},
            "persistence_dir": f"workspace/conversations/{self._id.hex}",
            "execution_status": "finished" if is_finished else "idle",
            "stats": {"usage_to_metrics": {"agent": metrics}},
        }
        self._add("base_state.json", encode_json(state))

    def _add(self, name: str, content: bytes) -> None:
        member = tarfile.TarInfo(f"workspace/conversations/{self._id.hex}/{name}")
        member.size, member.mtime = len(content), self._time
        self._tar.addfile(member, io.BytesIO(content))
        # `tarfile` lists what it has written: the list would grow with the conversation.
        self._tar.members.clear()  # type: ignore[attr-defined]


def copy_logs(reader: LedgerReader, rows: Sequence[AttemptRow], into: Path) -> None:
    """Write the logs of all attempts at an instance, one after the other, named as the benchmarks do."""
    name = name_file(rows[0].instance)
    for find, suffix in ((log_path, ".log"), (output_path, ".output.log")):
        sources = [find(reader.directory, row.attempt, row.instance) for row in rows]
        with (into / f"instance_{name}{suffix}").open("wb") as out:
            for source in sources:
                _append_log(source, out)


def _append_log(source: Path, out: BinaryIO) -> None:
    """Append a log, which may be compressed; a log that is not kept is empty."""
    packed = source.with_name(source.name + COMPRESSED_SUFFIX)
    if source.is_file():
        with source.open("rb") as log:
            shutil.copyfileobj(log, out)
    elif packed.is_file():
        with packed.open("rb") as log:
            zstandard.ZstdDecompressor().copy_stream(log, out)
