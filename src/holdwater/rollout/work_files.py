"""Files that attempts leave: the work that is kept for a later grading, and verdicts in the worker's journal.

The sandbox writes and restores the salvage itself. `ledger/journal.py` defines the journal; the fleet and
`ledger/recovery.py` read it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import msgspec

from ..core.errors import DiskFull, SandboxFailed
from ..core.failures import UNRESTORED
from ..core.masking import mask_bytes
from ..core.policy import list_kept_files
from ..core.records import KeptFile, KeptWork, Verdict
from ..ledger.attempt_files import check_file, describe_file
from ..ledger.directory import RunDirectory
from ..ledger.disk_reserve import DiskReserve
from ..ledger.durable_files import replace_file
from ..ledger.journal import Journal
from .attempt_services import AttemptPaths
from .attempt_state import AttemptState
from .user_calls import LONGEST_ANSWER, encode_answer


async def write_kept(state: AttemptState, path: Path, content: bytes) -> KeptFile:
    """Write a file for a later grading; return its description."""
    await state.calls.call(replace_file, path, mask_bytes(content))
    file: KeptFile = await state.calls.call(describe_file, path)
    return file


async def keep_answer(state: AttemptState, paths: AttemptPaths) -> tuple[KeptFile | None, str]:
    """Keep the answer in the verdict, or in a file if it is long.

    Return the file, and the reason why a later grading cannot use the answer (empty: it can).
    """
    if state.answer is None:
        state.answer_json = None
        return None, ""
    text, lacks = await state.calls.call(encode_answer, state.answer)
    if len(text) <= LONGEST_ANSWER:
        state.answer_json = text
        return None, lacks
    return await write_kept(state, paths.answer(), text.encode()), lacks


async def check_kept(state: AttemptState, paths: AttemptPaths, kept: KeptWork) -> None:
    """Raise `SandboxFailed` for a file that has changed since it was kept."""
    for file in list_kept_files(kept):
        if wrong := await state.calls.call(check_file, paths.kept_file(file.name), file):
            raise SandboxFailed(f"the kept work cannot be restored: {wrong}", kind=UNRESTORED)


async def read_answer(state: AttemptState, paths: AttemptPaths, kept: KeptWork) -> None:
    """Load the kept answer into the attempt's state."""
    text: str | bytes | None = state.answer_json
    if kept.answer is not None:
        text = await state.calls.call(paths.kept_file(kept.answer.name).read_bytes)
    if text is not None:
        state.answer = msgspec.json.decode(text)


class VerdictJournal:
    """The journal of one host. Verdicts that arrive together share one fsync, which runs in a thread."""

    def __init__(self, directory: RunDirectory, reserve: DiskReserve, worker: int, token: int) -> None:
        self._journal = Journal(directory, worker, token)
        self._reserve = reserve
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdwater-journal")

    def __enter__(self) -> VerdictJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=False)
        self._journal.close()

    async def write(self, verdict: Verdict) -> None:
        """Return when the verdict survives a power loss. Uses up the reserve before raising `DiskFull`."""
        while True:
            try:
                self._journal.append(verdict)
                break
            except DiskFull:
                if not self._reserve.release_piece():
                    raise
        await asyncio.get_running_loop().run_in_executor(self._thread, self._journal.sync)
