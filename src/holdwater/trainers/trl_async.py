"""A rollout worker for TRL's `AsyncGRPOTrainer`: groups of rollouts run all the time, beside the training.

The trainer sends its weights to its model server as usual. It tells this worker each new version; with an
`endpoint` the worker steers the rollout server to it, so that every reply names the version that sampled it.
"""

from __future__ import annotations

import asyncio
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count, cycle
from typing import Any, Unpack

from ..client import AsyncClient, Instance, OrderResult, TrajectoryForm
from ..client.async_client import OrderOptions
from .token_rows import TokenRow, list_sequence_rows, require_tokens

FULL = 0.05  # seconds between two looks at a full buffer


class TrlRolloutWorker:
    """Implements TRL's `RolloutWorkerProtocol` in a thread of this process.

    `connect` makes the client. `instances` are ordered again and again, in groups of `size`, `at_once` groups
    at a time. A `policy` among the `options`, or the server's model, answers the model calls.
    """

    def __init__(
        self,
        connect: Callable[[], AsyncClient],
        instances: Iterable[str | Instance],
        size: int,
        *,
        at_once: int = 16,
        endpoint: str | None = None,
        **options: Unpack[OrderOptions],
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(4 * size * at_once)
        self.metrics_queue: queue.Queue[Any] = queue.Queue(1024)
        self._connect = connect
        self._instances = zip(count(), cycle(instances), strict=False)
        self._size = size
        self._at_once = at_once
        self._endpoint = endpoint
        self._options: dict[str, Any] = {"trajectory": TrajectoryForm.TOKENS, **options}
        self._version = 0
        self._error: BaseException | None = None
        self._progress = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="holdwater-rollouts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise if the worker has failed, or has had no result for so long."""
        if self._error is not None:
            raise RuntimeError("the rollout worker has failed") from self._error
        if time.monotonic() - self._progress > stale_after_s:
            raise RuntimeError(f"no rollout has finished for {stale_after_s:g} seconds")

    def _run_thread(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:  # boundary: `check_health` raises it in the trainer  # noqa: BLE001
            self._error = error

    async def _run(self) -> None:
        running: set[asyncio.Task[None]] = set()  # bound: `at_once`
        steered = -1
        async with self._connect() as client:
            try:
                while not self._ended.is_set():
                    if self._endpoint is not None and steered != self._version:
                        steered = self._version
                        await client.steer(self._endpoint, version=str(steered))
                    while len(running) < self._at_once:
                        running.add(asyncio.create_task(self._run_group(client, *next(self._instances))))
                    done, running = await asyncio.wait(
                        running, timeout=FULL, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in done:
                        task.result()
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _run_group(self, client: AsyncClient, number: int, instance: str | Instance) -> None:
        ordered_at = self._version
        result = await client.run_group(instance, self._size, **self._options)
        require_tokens([result])
        self._progress = time.monotonic()
        if not self.metrics_queue.full():
            unscored = sum(rollout.reward is None for rollout in result.rollouts)
            self.metrics_queue.put_nowait({"rollout/unscored": (float(unscored), float(self._size))})
        for sample in _make_samples(result, number, ordered_at):
            while not self._ended.is_set():
                try:
                    self.rollout_buffer.put_nowait(sample)
                    break
                except queue.Full:
                    self._progress = time.monotonic()  # the trainer is slower than the rollouts
                    await asyncio.sleep(FULL)


def _make_samples(result: OrderResult, number: int, ordered_at: int) -> Iterator[Any]:
    """Yield TRL's samples of a group: the rows of all members with a reward."""
    import numpy
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    scored = [(rollout, rollout.reward) for rollout in result.rollouts if rollout.reward is not None]
    rewards = [reward for _, reward in scored]
    mean, spread = (statistics.fmean(rewards), statistics.pstdev(rewards)) if rewards else (0.0, 0.0)
    for rollout, reward in scored:
        for row in list_sequence_rows(rollout):
            yield RolloutSample(
                prompt=[{"role": "user", "content": rollout.instance}],  # TRL shows it in its logs
                completion=[{"role": "assistant", "content": str(rollout.answer or "")}],
                input_ids=numpy.array(row.prompt + row.response),
                completion_mask=numpy.array([0] * len(row.prompt) + row.mask),
                old_log_probs=numpy.array([0.0] * len(row.prompt) + row.logprobs, dtype=numpy.float32),
                advantage=(reward - mean) / (spread + 1e-4),
                model_version=_find_oldest(row, ordered_at),
                group_id=number,
                metrics={"reward": reward},
                enqueued_at=time.time(),
            )


def _find_oldest(row: TokenRow, ordered_at: int) -> int:
    """Return the oldest version that sampled the row; that of the order if a reply names none."""
    return min((int(version) if version.isdigit() else ordered_at for version in row.versions), default=0)
