"""Artifacts: taken out of the agent's sandbox, kept with the attempt, and handed to a separate verifier.

One that cannot be had is noted in `manifest.json` and costs nobody a grade.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import msgspec

from ...core.authoring import GradingSandbox
from ...core.errors import SandboxFailed
from ...core.records import Record
from .records import Artifact

MANIFEST = "manifest.json"

_log = logging.getLogger(__name__)


class Taken(Record, frozen=True, omit_defaults=False):
    """What became of an artifact, in the words of Harbor's manifest."""

    source: str
    destination: str  # below the attempt's own directory
    type: str  # `file` or `directory`
    status: str  # `ok`, `empty`, `failed` or `skipped`
    exclude: tuple[str, ...] = ()


async def take(artifacts: Sequence[Artifact], sandbox: GradingSandbox, into: Path) -> list[Taken]:
    """Copy what is there of `artifacts` below `into`, and write down what became of each."""
    claimed = [PurePosixPath(MANIFEST)]  # bound: the artifacts of one stage
    found: list[Taken] = []
    for artifact in artifacts:
        path = _place(artifact)
        overlaps = any(path.is_relative_to(other) or other.is_relative_to(path) for other in claimed)
        claimed.append(path)
        found.append(await _take(artifact, sandbox, into, path, skip=overlaps))
    into.mkdir(parents=True, exist_ok=True)
    (into / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return found


async def hand_over(taken: Sequence[Taken], sandbox: GradingSandbox, kept: Path) -> None:
    """Put what was taken where it was, in another sandbox."""
    for artifact in taken:
        if artifact.status == "ok":
            await sandbox.put(kept / artifact.destination, artifact.source)


async def keep(path: str, sandbox: GradingSandbox, into: Path) -> None:
    """Keep a directory of logs, if it can be had."""
    try:
        await sandbox.take(path, into)
    except (SandboxFailed, OSError) as error:
        _log.warning("not kept path=%s reason=%s", path, error)


async def _take(
    artifact: Artifact, sandbox: GradingSandbox, into: Path, path: PurePosixPath, *, skip: bool
) -> Taken:
    target = into / path
    status = "skipped"
    if not skip:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            await sandbox.take(artifact.source, target, artifact.exclude)
            status = "ok" if target.is_file() or any(target.iterdir()) else "empty"
        except (SandboxFailed, OSError) as error:
            status = "failed"
            _log.warning("artifact not taken source=%s reason=%s", artifact.source, error)
    kind = "file" if target.is_file() else "directory"
    return Taken(artifact.source, str(path), kind, status, artifact.exclude)


def _place(artifact: Artifact) -> PurePosixPath:
    """Where it is kept: where the task says, or where it was in its sandbox."""
    parts = PurePosixPath(artifact.destination or artifact.source).parts
    return PurePosixPath(*(part for part in parts if part != "/"))
