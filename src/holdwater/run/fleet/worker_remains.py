"""Recovers what a dead worker leaves: verdicts that it could not report, and the sandboxes of its attempts.

`local.py` decides about the attempts themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...core.records import Verdict
from ...ledger.directory import RunDirectory
from ...ledger.journal import journal_path, read_journal
from ...rollout.worker_protocol import WorkerSetup
from ...sandbox.scratch import sweep_attempts


class WorkerRemains:
    """The remains of one fleet's workers. Reading and sweeping run in threads."""

    def __init__(self, welcome: WorkerSetup, note: Callable[[str, str], None]) -> None:
        self._config = welcome.config
        self._directory = RunDirectory(Path(welcome.directory))
        self._token = welcome.token
        self._note = note
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="holdwater-sweep")

    async def read_verdicts(self, worker: int, attempts: Collection[int]) -> list[Verdict]:
        """Return these attempts' verdicts in the worker's journal. Damage is noted; intact records count."""
        path = journal_path(self._directory, worker, self._token)
        damages: list[str] = []  # bound: the records of the journal

        def read() -> list[Verdict]:
            return [verdict for verdict in read_journal(path, damages.append) if verdict.attempt in attempts]

        verdicts: list[Verdict] = []  # bound: the run's concurrency
        try:
            verdicts = await asyncio.get_running_loop().run_in_executor(self._threads, read)
        except OSError as error:
            damages.append(f"the journal `{path}` cannot be read: {error}")
        for damage in damages:
            self._note("journal.damaged", damage)
        return verdicts

    async def sweep(self, attempts: list[int]) -> None:
        """Remove the leftovers of a dead worker's attempts now: the end of the run may be days away."""
        config = self._config
        place = self._directory.sandbox_root(config)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, sweep_attempts, config.id, place, attempts)
        except OSError as error:
            self._note("sweep.failed", f"attempts {attempts}: {error}")

    def close(self) -> None:
        self._threads.shutdown(wait=False)
