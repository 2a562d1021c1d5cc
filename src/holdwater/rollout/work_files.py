"""The files that hold an attempt's work: written before it is graded, checked before it is graded again.

The sandbox writes and restores the salvage itself.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..core.errors import SandboxFailed
from ..core.failures import UNRESTORED
from ..core.masking import mask_bytes
from ..core.policy import list_kept_files
from ..core.records import KeptFile, KeptWork
from ..ledger.attempt_files import check_file, describe_file
from ..ledger.durable_files import replace_file
from .attempt_services import ArtifactPaths
from .attempt_state import AttemptState
from .user_results import LONGEST_ANSWER, encode_answer


async def write_kept(life: AttemptState, path: Path, content: bytes) -> KeptFile:
    """Write a file for a later grading; return its description."""
    await life.calls.call(replace_file, path, mask_bytes(content))
    file: KeptFile = await life.calls.call(describe_file, path)
    return file


async def keep_answer(life: AttemptState, paths: ArtifactPaths) -> tuple[KeptFile | None, str]:
    """Keep the answer in the verdict, or in a file if it is long.

    Return the file, and the reason why a later grading cannot use the answer (empty: it can).
    """
    if life.answer is None:
        life.answer_json = None
        return None, ""
    text, lacks = await life.calls.call(encode_answer, life.answer)
    if len(text) <= LONGEST_ANSWER:
        life.answer_json = text
        return None, lacks
    return await write_kept(life, paths.answer(), text.encode()), lacks


async def check_kept(life: AttemptState, paths: ArtifactPaths, kept: KeptWork) -> None:
    """Raise `SandboxFailed` for a file that has changed since it was kept."""
    for file in list_kept_files(kept):
        if wrong := await life.calls.call(check_file, paths.kept_file(file.name), file):
            raise SandboxFailed(f"the kept work cannot be restored: {wrong}", kind=UNRESTORED)


async def read_answer(life: AttemptState, paths: ArtifactPaths, kept: KeptWork) -> None:
    """Load the kept answer into the attempt's state."""
    text: str | bytes | None = life.answer_json
    if kept.answer is not None:
        text = await life.calls.call(paths.kept_file(kept.answer.name).read_bytes)
    if text is not None:
        life.answer = msgspec.json.decode(text)
