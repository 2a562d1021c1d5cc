"""Group commit: one thread owns the database and runs all queued operations in one transaction.

Callers get their results after the commit, never before. The operations themselves are in `statements.py`.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..core.errors import DiskFull, HoldwaterError, LedgerFailed
from .schema import to_ledger_error
from .statements import LedgerStatements

MOST_WAITING = 2048  # operations in the queue; further callers wait before they enqueue
LARGEST_BATCH = 1024
STOP_TIMEOUT = 60.0  # seconds for the last commit and the checkpoint

T = TypeVar("T")
QueuedWork = tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any]]
WorkAnswer = tuple[asyncio.Future[Any], Any, BaseException | None]


class LedgerWriter:
    """The writer's thread and its queue. Belongs to one event loop."""

    def __init__(self, book: LedgerStatements, relieve: Callable[[int], bool]) -> None:
        self._statements = book
        self._relieve = relieve
        self._path: Path = book.path
        # bound: MOST_WAITING, by `_room`
        self._queue: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._room = asyncio.Semaphore(MOST_WAITING)
        self._failure: LedgerFailed | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._stopped = asyncio.Event()

    async def start(self) -> None:
        """Start the thread and wait until it has opened the database."""
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        try:
            await self._opened
        except BaseException:  # boundary: stop the thread, then raise again
            await self.stop()
            raise

    async def stop(self) -> None:
        """Commit queued operations, close the database and end the thread."""
        self._closed = True
        self._queue.put(None)
        cancelled: asyncio.CancelledError | None = None
        while not self._stopped.is_set():
            try:
                async with asyncio.timeout(STOP_TIMEOUT):
                    await self._stopped.wait()
            except TimeoutError:
                raise LedgerFailed(
                    f"the disk did not respond for {STOP_TIMEOUT:.0f} s: `{self._path}`"
                ) from None
            except asyncio.CancelledError as e:
                cancelled = e  # queued operations are committed before the cancellation takes effect
        if cancelled is not None:
            raise cancelled

    async def do(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `work` in the next transaction; return its result after the commit."""
        work = partial(work, **kwargs) if kwargs else work
        await self._room.acquire()
        if self._failure is not None or self._closed:
            self._room.release()
            raise copy_failure(self._failure or LedgerFailed("the ledger is closed"))
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put((work, args, future))
        return await future

    # The thread.

    def _run(self) -> None:
        try:
            self._statements.open()
        except BaseException as e:  # boundary: `start` raises it  # noqa: BLE001
            self._call_on_loop(_settle_future, self._opened, None, e)
            self._call_on_loop(self._stopped.set)
            return
        self._call_on_loop(_settle_future, self._opened, None, None)
        going = True
        while going:
            batch, going = self._take_batch()
            if batch:
                self._call_on_loop(self._send_answers, self._commit(batch))
        try:
            self._statements.close()
        finally:
            self._call_on_loop(self._stopped.set)

    def _take_batch(self) -> tuple[list[QueuedWork], bool]:
        """Wait for work, then take at most `LARGEST_BATCH` operations; False if no more will follow."""
        batch: list[QueuedWork] = []
        item = self._queue.get()
        while item is not None:
            batch.append(item)
            if len(batch) == LARGEST_BATCH:
                return batch, True
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, True
        return batch, False

    def _commit(self, batch: list[QueuedWork]) -> list[WorkAnswer]:
        """Commit all operations or none. On a full disk, retry the batch while `relieve` returns True."""
        tries = 0
        while self._failure is None:
            try:
                self._statements.begin()
                answers = [_run_work(*item) for item in batch]
                self._statements.commit()
                return answers
            except sqlite3.Error as e:
                failure = _to_ledger_failure(self._path, e)
            except LedgerFailed as e:
                failure = e
            except Exception as e:  # boundary: a thread that died would leave its callers waiting  # noqa: BLE001
                failure = LedgerFailed(f"cannot write the ledger: `{self._path}`: {e!r}")
            self._statements.rollback()
            tries += 1
            if not (isinstance(failure, DiskFull) and self._relieve(tries)):
                self._failure = failure
        return [(future, None, copy_failure(self._failure)) for _, _, future in batch]

    def _call_on_loop(self, callback: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            pass  # the loop is closed: no caller is left to notify

    # The methods below run on the event loop.

    def _send_answers(self, answers: list[WorkAnswer]) -> None:
        for future, value, error in answers:
            self._room.release()
            _settle_future(future, value, error)


def copy_failure(failure: LedgerFailed) -> LedgerFailed:
    """Copy a failure for another caller: a raised error keeps its caller's frames alive."""
    return LedgerFailed(failure.message, failure.hint)


def _run_work(work: Callable[..., Any], args: tuple[Any, ...], future: asyncio.Future[Any]) -> WorkAnswer:
    """Run one operation. An error of the operation fails only its caller; a disk error fails the batch."""
    try:
        return future, work(*args), None
    except sqlite3.IntegrityError as e:
        return future, None, LedgerFailed(f"the ledger refused a row: {e}")
    except (sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.DataError) as e:
        return future, None, e
    except sqlite3.Error:
        raise
    except Exception as e:  # boundary: the caller of `do` gets it  # noqa: BLE001
        return future, None, e


def _settle_future(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return  # the caller was cancelled
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def _to_ledger_failure(path: Path, error: sqlite3.Error) -> LedgerFailed:
    failure: HoldwaterError = to_ledger_error(path, error)
    return failure if isinstance(failure, LedgerFailed) else LedgerFailed(failure.message, failure.hint)
