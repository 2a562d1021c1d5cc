"""Passes committed verdicts to observers, each in its own thread.

An observer that raises or hangs does not affect the run: verdicts that it misses are counted and dropped.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ...core.records import Verdict

Observer = Callable[[Verdict], None]
RecordEvent = Callable[[str, str], Future[None]]  # from any thread; done when the event is committed
QUEUE = 1000  # verdicts that an observer may be behind
CLOSE_SECONDS = 2.0


class VerdictObservers:
    """All observers of a run's verdicts."""

    def __init__(self, observers: Sequence[Observer], record: RecordEvent) -> None:
        self._threads = [_ObserverThread(observer, record) for observer in observers]

    def tell(self, verdict: Verdict) -> None:
        for watcher in self._threads:
            watcher.tell(verdict)

    def close(self) -> list[str]:
        """Wait briefly for the observers; return what they missed, in words.

        It blocks and must not run on the loop, which the observers need to record failures.
        """
        return [text for watcher in self._threads if (text := watcher.close())]


class _ObserverThread:
    def __init__(self, observer: Observer, record: RecordEvent) -> None:
        self._observer = observer
        self._record = record
        self._queue: queue.Queue[Verdict | None] = queue.Queue(maxsize=QUEUE)
        self._dropped = 0
        self._thread = threading.Thread(target=self._serve, name="observer", daemon=True)
        self._thread.start()

    def tell(self, verdict: Verdict) -> None:
        try:
            self._queue.put_nowait(verdict)
        except queue.Full:
            self._dropped += 1

    def close(self) -> str:
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # the observer hangs and is left behind
        self._thread.join(CLOSE_SECONDS)
        behind = self._dropped + self._queue.qsize()
        return f"an observer missed {behind} verdicts" if behind else ""

    def _serve(self) -> None:
        while (verdict := self._queue.get()) is not None:
            try:
                self._observer(verdict)
            except Exception as error:  # boundary: the observer's code  # noqa: BLE001
                self._record_failure(f"{type(error).__name__}: {error}")

    def _record_failure(self, message: str) -> None:
        """Record the failure and wait for the commit, so that the run does not end before it."""
        try:
            self._record("observer.failed", message).result()
        except Exception:  # boundary: a ledger that cannot write has stopped the run already  # noqa: BLE001
            self._dropped += 1
