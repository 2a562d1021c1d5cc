"""An attempt that is ended while its worker has not come to it yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.host_harness import hosting, suite

from holdwater.core.groups import make_cancel_failure


async def solve(instance: Any, sandbox: Any, model: Any) -> str:
    return "done"


async def test_one_that_is_ended_before_its_first_step_has_its_verdict(tmp_path: Path) -> None:
    failure = make_cancel_failure("client", "nobody wants it")
    async with hosting(tmp_path, suite(), solve) as hosted:
        attempt = hosted.start()
        hosted.interrupt(attempt, failure)

        verdict = await hosted.verdict(attempt)

    assert (verdict.failure, verdict.answer) == (failure, None)
