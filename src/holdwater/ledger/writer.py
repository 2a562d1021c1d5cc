"""Group commit: one thread owns the book, takes all that waits into one transaction, commits, then answers.

It does not know what the work is: that is `book.py`. An answer is given after the commit, never before.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..core.errors import DiskFull, HoldwaterError, LedgerFailed
from .book import Book
from .schema import failed

MOST_WAITING = 2048  # operations in the queue; further callers wait before they enter it
LARGEST_BATCH = 1024
STOPPING = 60.0  # seconds for the last commit and the checkpoint

T = TypeVar("T")
Work = tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any]]
Answer = tuple[asyncio.Future[Any], Any, BaseException | None]


class Writer:
    """The thread, and the queue that leads to it. Belongs to one event loop."""

    def __init__(self, book: Book, relieve: Callable[[int], bool]) -> None:
        self._book = book
        self._relieve = relieve
        self._path: Path = book.path
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()  # bound: MOST_WAITING, by `_room`
        self._room = asyncio.Semaphore(MOST_WAITING)
        self._failure: LedgerFailed | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._stopped = asyncio.Event()

    async def start(self) -> None:
        """Start the thread and let it open the book."""
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        try:
            await self._opened
        except BaseException:  # boundary: given back, then raised again
            await self.stop()
            raise

    async def stop(self) -> None:
        """Commit what waits, close the book, end the thread."""
        self._closed = True
        self._queue.put(None)
        cancelled: asyncio.CancelledError | None = None
        while not self._stopped.is_set():
            try:
                async with asyncio.timeout(STOPPING):
                    await self._stopped.wait()
            except TimeoutError:
                raise LedgerFailed(f"the disk did not answer for {STOPPING:.0f} s: `{self._path}`") from None
            except asyncio.CancelledError as e:
                cancelled = e  # what was acknowledged is safe; what waits is committed before anyone leaves
        if cancelled is not None:
            raise cancelled

    async def do(self, work: Callable[..., T], *args: Any) -> T:
        """Have it done in the next transaction; returns when that is committed."""
        await self._room.acquire()
        if self._failure is not None or self._closed:
            self._room.release()
            raise again(self._failure or LedgerFailed("the ledger is closed"))
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put((work, args, future))
        return await future

    # The thread.

    def _run(self) -> None:
        try:
            self._book.open()
        except BaseException as e:  # boundary: whoever starts the writer gets it  # noqa: BLE001
            self._tell(_settle, self._opened, None, e)
            self._tell(self._stopped.set)
            return
        self._tell(_settle, self._opened, None, None)
        going = True
        while going:
            batch, going = self._take()
            if batch:
                self._tell(self._answer, self._commit(batch))
        try:
            self._book.close()
        finally:
            self._tell(self._stopped.set)

    def _take(self) -> tuple[list[Work], bool]:
        """Wait for work, then take all there is, to a bound; False when it was the last."""
        batch: list[Work] = []
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

    def _commit(self, batch: list[Work]) -> list[Answer]:
        """All of it or nothing. Without room it is tried again from the start, as long as relief is given."""
        tries = 0
        while self._failure is None:
            try:
                self._book.begin()
                answers = [_attempt(*item) for item in batch]
                self._book.commit()
                return answers
            except sqlite3.Error as e:
                failure = _as_failed(self._path, e)
            except LedgerFailed as e:
                failure = e
            except Exception as e:  # boundary: a thread that died would leave its callers waiting  # noqa: BLE001
                failure = LedgerFailed(f"cannot write the ledger: `{self._path}`: {e!r}")
            self._book.rollback()
            tries += 1
            if not (isinstance(failure, DiskFull) and self._relieve(tries)):
                self._failure = failure
        return [(future, None, again(self._failure)) for _, _, future in batch]

    def _tell(self, callback: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            pass  # the loop is closed: nobody is left who could be told

    # Back on the loop.

    def _answer(self, answers: list[Answer]) -> None:
        for future, value, error in answers:
            self._room.release()
            _settle(future, value, error)


def again(failure: LedgerFailed) -> LedgerFailed:
    """The same failure for another caller: a raised error keeps its caller's frames alive."""
    return LedgerFailed(failure.message, failure.hint)


def _attempt(work: Callable[..., Any], args: tuple[Any, ...], future: asyncio.Future[Any]) -> Answer:
    """Do one operation. One that fails by its own fault fails alone; a disk that fails is everybody's."""
    try:
        return future, work(*args), None
    except sqlite3.IntegrityError as e:
        return future, None, LedgerFailed(f"the ledger refused a row: {e}")
    except (sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.DataError) as e:
        return future, None, e
    except sqlite3.Error:
        raise
    except Exception as e:  # boundary: its caller gets it  # noqa: BLE001
        return future, None, e


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return  # its caller was cancelled
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def _as_failed(path: Path, error: sqlite3.Error) -> LedgerFailed:
    failure: HoldwaterError = failed(path, error)
    return failure if isinstance(failure, LedgerFailed) else LedgerFailed(failure.message, failure.hint)
