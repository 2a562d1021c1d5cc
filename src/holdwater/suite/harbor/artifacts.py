"""Artifacts: taken out of the agent's sandbox, kept with the attempt, and handed to a separate verifier.

`manifest.json` says what became of each. An artifact that is not there costs no grade; a separate verifier
that did not get one that is there does not grade.
"""

from __future__ import annotations

import logging
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from ...core.authoring import GradingSandbox
from ...core.errors import GradeFailed, SandboxFailed
from ...core.records import LeftOut, Record
from ...ledger.private import make_directory, write_private
from ..grading import tail
from .records import Artifact

MANIFEST = "manifest.json"
DIRECTORY = "artifacts"  # below the attempt's own directory, or a step's
WRITING = 60.0  # seconds
AT_ONCE = 100  # links that one command makes
NAMED = 20  # entries that a grade names
LINKS = 'while [ $# -gt 1 ]; do ln -sfn -- "$1" "$2" || exit 1; shift 2; done'
EMPTY = (
    "if [ -L {0} ] || [ ! -d {0} ]; then rm -rf {0}; mkdir -p {0}; fi; "
    "chmod -R u+rwx {0} || true; rm -rf {0}/* {0}/.[!.]* {0}/..?*; chmod a+rwx {0}"
)

_log = logging.getLogger(__name__)


class Taken(Record, frozen=True, omit_defaults=False):
    """What became of an artifact, in the words of Harbor's manifest; the last two are ours."""

    source: str
    destination: str  # below the attempt's own directory
    type: str  # `file` or `directory`
    status: str  # `ok`, `empty`, `failed` or `skipped`
    exclude: tuple[str, ...] = ()
    reason: str = ""  # why it failed although it is there
    left_out: tuple[LeftOut, ...] = ()


async def take(artifacts: Sequence[Artifact], sandbox: GradingSandbox, kept: Path) -> list[Taken]:
    """Copy what is there of `artifacts` below `kept`, and write down what became of each."""
    shutil.rmtree(kept / DIRECTORY, ignore_errors=True)  # of an earlier grading
    claimed = [PurePosixPath(MANIFEST)]  # bound: the artifacts of one stage
    found: list[Taken] = []
    for artifact in artifacts:
        path = _place(artifact)
        overlaps = any(path.is_relative_to(other) or other.is_relative_to(path) for other in claimed)
        claimed.append(path)
        found.append(await _take(artifact, sandbox, kept, PurePosixPath(DIRECTORY, path), skip=overlaps))
    make_directory(kept / DIRECTORY)
    write_private(kept / DIRECTORY / MANIFEST, msgspec.json.format(msgspec.json.encode(found)))
    return found


async def hand_over(taken: Sequence[Taken], sandbox: GradingSandbox, kept: Path, user: str | None) -> None:
    """Put what was taken where it was, in another sandbox; GradeFailed where something would be missing."""
    for artifact in taken:
        lost = artifact.reason or next((str(one) for one in artifact.left_out if one.lost), "")
        if lost:
            raise GradeFailed(
                f"the verifier did not get an artifact: `{artifact.source}`: {lost}", kind="artifacts"
            )
        if artifact.status not in ("ok", "empty"):
            continue
        if artifact.type == "directory" and artifact.source.strip("/"):
            await _run(["sh", "-c", empty(artifact.source)], sandbox, user)
        await sandbox.put(kept / artifact.destination, artifact.source)
        links = [one for one in artifact.left_out if one.link is not None]
        for at in range(0, len(links), AT_ONCE):
            words = [word for one in links[at : at + AT_ONCE] for word in _link(one, artifact.source)]
            await _run(["sh", "-c", LINKS, "sh", *words], sandbox, user)


def empty(directory: str) -> str:
    """A shell line that empties a directory, or makes it."""
    return EMPTY.format(shlex.quote(directory))


def named(taken: Sequence[Taken]) -> str:
    """The entries that were left out, for people; empty: none."""
    entries = [f"{artifact.source}: {one}" for artifact in taken for one in artifact.left_out]
    entries += [f"{artifact.source}: {artifact.reason}" for artifact in taken if artifact.reason]
    if not entries:
        return ""
    more = f"... and {len(entries) - NAMED} more" if len(entries) > NAMED else ""
    return "\n".join(["left out of the artifacts:", *entries[:NAMED], more]).strip()


async def keep(path: str, sandbox: GradingSandbox, into: Path) -> None:
    """Keep a directory of logs, if it can be had."""
    try:
        for one in await sandbox.take(path, into):
            _log.warning("not kept path=%s/%s reason=%s", path, one.path, one.reason)
    except (SandboxFailed, OSError) as error:
        _log.warning("not kept path=%s reason=%s", path, error)


async def _take(
    artifact: Artifact, sandbox: GradingSandbox, kept: Path, path: PurePosixPath, *, skip: bool
) -> Taken:
    target = kept / path
    status, reason, left_out = "skipped", "", tuple[LeftOut, ...]()
    if not skip:
        try:
            make_directory(target.parent)
            left_out = await sandbox.take(artifact.source, target, artifact.exclude)
            status = "ok" if target.is_file() or any(target.iterdir()) else "empty"
        except (SandboxFailed, OSError) as error:
            status = "failed"
            reason = "" if _absent(error) else str(error)
            _log.warning("artifact not taken source=%s reason=%s", artifact.source, error)
    kind = "file" if target.is_file() else "directory"
    return Taken(artifact.source, str(path), kind, status, artifact.exclude, reason, left_out)


def _absent(error: SandboxFailed | OSError) -> bool:
    """Whether the agent left neither a file nor a directory there."""
    if isinstance(error, SandboxFailed):
        return error.kind == "path"
    return isinstance(error, FileNotFoundError | NotADirectoryError)


def _link(one: LeftOut, source: str) -> Iterator[str]:
    yield one.link or ""
    yield f"{source.rstrip('/')}/{one.path}"


async def _run(words: list[str], sandbox: GradingSandbox, user: str | None) -> None:
    result = await sandbox.run(words, timeout=WRITING, user=user)
    if not result.ok:
        raise GradeFailed(
            f"the verifier did not get its artifacts: {tail(result.output, 300)}", kind="artifacts"
        )


def _place(artifact: Artifact) -> PurePosixPath:
    """Where it is kept: where the task says, or where it was in its sandbox."""
    parts = PurePosixPath(artifact.destination or artifact.source).parts
    return PurePosixPath(*(part for part in parts if part != "/"))
