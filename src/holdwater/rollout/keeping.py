"""The files that hold an attempt's work: written before it is graded, checked before it is graded again.

The salvage itself is written and put back by the sandbox.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..core.errors import SandboxFailed
from ..core.failures import UNRESTORED
from ..core.kept_work import kept_files
from ..core.masking import mask_bytes
from ..core.records import KeptFile, KeptWork
from ..ledger.disk import replace_file
from ..ledger.files import check_file, describe_file
from .foreign import LONGEST_ANSWER, encode_answer
from .life import Life
from .place import Paths


async def write_kept(life: Life, path: Path, content: bytes) -> KeptFile:
    """Write a file that a later grading reads."""
    await life.calls.call(replace_file, path, mask_bytes(content))
    file: KeptFile = await life.calls.call(describe_file, path)
    return file


async def keep_answer(life: Life, paths: Paths) -> tuple[KeptFile | None, str]:
    """The answer in the verdict, or in a file if it is long; why a later grading cannot use it."""
    if life.answer is None:
        life.answer_json = None
        return None, ""
    text, lacks = await life.calls.call(encode_answer, life.answer)
    if len(text) <= LONGEST_ANSWER:
        life.answer_json = text
        return None, lacks
    return await write_kept(life, paths.answer(), text.encode()), lacks


async def check_kept(life: Life, paths: Paths, kept: KeptWork) -> None:
    """Refuse files that are not as they were kept."""
    for file in kept_files(kept):
        if wrong := await life.calls.call(check_file, paths.kept(file.name), file):
            raise SandboxFailed(f"the work cannot be put back: {wrong}", kind=UNRESTORED)


async def read_answer(life: Life, paths: Paths, kept: KeptWork) -> None:
    """Give the attempt the answer that was kept."""
    text: str | bytes | None = life.answer_json
    if kept.answer is not None:
        text = await life.calls.call(paths.kept(kept.answer.name).read_bytes)
    if text is not None:
        life.answer = msgspec.json.decode(text)
