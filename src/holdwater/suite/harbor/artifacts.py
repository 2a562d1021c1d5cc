"""Copies artifacts out of the agent's sandbox, keeps them, and hands them to a separate verifier.

`manifest.json` records the status of each artifact. A missing artifact does not affect the grade. If an
existing artifact cannot be handed to a separate verifier, the grading fails.
"""

from __future__ import annotations

import logging
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import msgspec

from ...core.authoring import GradingSandbox
from ...core.errors import GradeFailed, SandboxFailed
from ...core.records import Record, SkippedEntry
from ...ledger.durable_files import make_directory, write_private
from ..grading import tail
from .records import ArtifactSection

MANIFEST = "manifest.json"
DIRECTORY = "artifacts"  # below the attempt's directory, or a step's
WRITE_SECONDS = 60.0
AT_ONCE = 100  # links that one command creates
MOST_NAMED = 20  # maximum number of entries named in a grade
LINKS = 'while [ $# -gt 1 ]; do ln -sfn -- "$1" "$2" || exit 1; shift 2; done'
EMPTY = (
    "if [ -L {0} ] || [ ! -d {0} ]; then rm -rf {0}; mkdir -p {0}; fi; "
    "chmod -R u+rwx {0} || true; rm -rf {0}/* {0}/.[!.]* {0}/..?*; chmod a+rwx {0}"
)

_log = logging.getLogger(__name__)


class TakenArtifact(Record, frozen=True, omit_defaults=False):
    """The status of an artifact, in the format of Harbor's manifest; the last two fields are ours."""

    source: str
    destination: str  # below the attempt's directory
    type: str  # `file` or `directory`
    status: str  # `ok`, `empty`, `failed` or `skipped`
    exclude: tuple[str, ...] = ()
    reason: str = ""  # why it failed although it exists
    left_out: tuple[SkippedEntry, ...] = ()


async def take(
    artifacts: Sequence[ArtifactSection], sandbox: GradingSandbox, kept: Path
) -> list[TakenArtifact]:
    """Copy the artifacts that exist below `kept`, and write the status of each to the manifest."""
    shutil.rmtree(kept / DIRECTORY, ignore_errors=True)  # left by an earlier grading
    claimed = [PurePosixPath(MANIFEST)]  # bound: the artifacts of one stage
    found: list[TakenArtifact] = []
    for artifact in artifacts:
        path = _kept_path(artifact)
        overlaps = any(path.is_relative_to(other) or other.is_relative_to(path) for other in claimed)
        claimed.append(path)
        found.append(await _take(artifact, sandbox, kept, PurePosixPath(DIRECTORY, path), skip=overlaps))
    make_directory(kept / DIRECTORY)
    write_private(kept / DIRECTORY / MANIFEST, msgspec.json.format(msgspec.json.encode(found)))
    return found


async def hand_over(
    taken: Sequence[TakenArtifact], sandbox: GradingSandbox, kept: Path, user: str | None
) -> None:
    """Put the artifacts at their original paths in another sandbox; raise GradeFailed if one is missing."""
    for artifact in taken:
        lost = artifact.reason or next((str(one) for one in artifact.left_out if one.lost), "")
        if lost:
            raise GradeFailed(
                f"an artifact could not be handed to the verifier: `{artifact.source}`: {lost}",
                kind="artifacts",
            )
        if artifact.status not in ("ok", "empty"):
            continue
        if artifact.type == "directory" and artifact.source.strip("/"):
            await _run(["sh", "-c", clearing_command(artifact.source)], sandbox, user)
        await sandbox.put(kept / artifact.destination, artifact.source)
        links = [one for one in artifact.left_out if one.link is not None]
        for at in range(0, len(links), AT_ONCE):
            words = []
            for one in links[at : at + AT_ONCE]:
                words += [one.link or "", f"{artifact.source.rstrip('/')}/{one.path}"]
            await _run(["sh", "-c", LINKS, "sh", *words], sandbox, user)


def clearing_command(directory: str) -> str:
    """Return a shell command that empties a directory, or creates it."""
    return EMPTY.format(shlex.quote(directory))


def list_left_out(taken: Sequence[TakenArtifact]) -> str:
    """Return the entries that were left out as readable text; empty if there are none."""
    entries = [f"{artifact.source}: {one}" for artifact in taken for one in artifact.left_out]
    entries += [f"{artifact.source}: {artifact.reason}" for artifact in taken if artifact.reason]
    if not entries:
        return ""
    more = f"... and {len(entries) - MOST_NAMED} more" if len(entries) > MOST_NAMED else ""
    return "\n".join(["left out of the artifacts:", *entries[:MOST_NAMED], more]).strip()


async def keep_logs(path: str, sandbox: GradingSandbox, into: Path) -> None:
    """Keep a directory of logs; log a warning if it cannot be copied."""
    try:
        for one in await sandbox.take(path, into):
            _log.warning("not kept path=%s/%s reason=%s", path, one.path, one.reason)
    except (SandboxFailed, OSError) as error:
        _log.warning("not kept path=%s reason=%s", path, error)


async def _take(
    artifact: ArtifactSection, sandbox: GradingSandbox, kept: Path, path: PurePosixPath, *, skip: bool
) -> TakenArtifact:
    target = kept / path
    status, reason, left_out = "skipped", "", tuple[SkippedEntry, ...]()
    if not skip:
        try:
            make_directory(target.parent)
            left_out = await sandbox.take(artifact.source, target, artifact.exclude)
            status = "ok" if target.is_file() or any(target.iterdir()) else "empty"
        except (SandboxFailed, OSError) as error:
            status = "failed"
            reason = "" if _is_absent(error) else str(error)
            _log.warning("artifact not taken source=%s reason=%s", artifact.source, error)
    kind = "file" if target.is_file() else "directory"
    return TakenArtifact(artifact.source, str(path), kind, status, artifact.exclude, reason, left_out)


def _is_absent(error: SandboxFailed | OSError) -> bool:
    """Return whether the agent left neither a file nor a directory at the path."""
    if isinstance(error, SandboxFailed):
        return error.kind == "path"
    return isinstance(error, FileNotFoundError | NotADirectoryError)


async def _run(words: list[str], sandbox: GradingSandbox, user: str | None) -> None:
    result = await sandbox.run(words, timeout=WRITE_SECONDS, user=user)
    if not result.ok:
        raise GradeFailed(
            f"artifacts could not be handed to the verifier: {tail(result.output, 300)}", kind="artifacts"
        )


def _kept_path(artifact: ArtifactSection) -> PurePosixPath:
    """Return the path below the artifacts directory: the task's `destination`, or the path in the sandbox."""
    parts = PurePosixPath(artifact.destination or artifact.source).parts
    return PurePosixPath(*(part for part in parts if part != "/"))
