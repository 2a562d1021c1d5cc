"""Tells observers of committed verdicts, each in a thread of its own.

An observer that raises or hangs changes nothing: what it could not take is counted and dropped.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ..core.records import Verdict

Observer = Callable[[Verdict], None]
RecordEvent = Callable[[str, str], Future[None]]  # from any thread; done when the event is committed
QUEUE = 1000  # verdicts that an observer may be behind
CLOSE_SECONDS = 2.0


class Observers:
    """Everybody who wants to hear of verdicts."""

    def __init__(self, observers: Sequence[Observer], record: RecordEvent) -> None:
        self._watchers = [_Watcher(observer, record) for observer in observers]

    def tell(self, verdict: Verdict) -> None:
        for watcher in self._watchers:
            watcher.tell(verdict)

    def close(self) -> list[str]:
        """Let them finish, for a while; what was dropped, in words. Blocks: their failures need the loop."""
        return [text for watcher in self._watchers if (text := watcher.close())]


class _Watcher:
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
            pass  # it hangs, and is left behind
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
        """Wait until it is committed: a run does not end before its observers, so that none is lost."""
        try:
            self._record("observer.failed", message).result()
        except Exception:  # boundary: a ledger that cannot write has stopped the run already  # noqa: BLE001
            self._dropped += 1
