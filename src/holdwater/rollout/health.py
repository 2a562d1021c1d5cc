"""Waits until a sandbox is ready, by running the health command of its instance."""

from __future__ import annotations

import asyncio

from ..core.authoring import Sandbox
from ..core.errors import SandboxFailed
from ..core.records import Health


async def wait_healthy(sandbox: Sandbox, health: Health) -> None:
    """Run the health command until it succeeds.

    Raise `SandboxFailed` after `retries` failures past the start period.
    """
    begun = asyncio.get_running_loop().time()
    failures = 0
    while True:
        result = await sandbox.run(health.command, timeout=health.timeout)
        if result.ok:
            return
        failures += asyncio.get_running_loop().time() - begun >= health.start_period
        if failures >= max(1, health.retries):
            said = "no answer in time" if result.timed_out else f"status {result.exit_code}"
            raise SandboxFailed(
                f"not healthy after {failures} checks: {said}: {result.output.strip()[-500:]}", kind="health"
            )
        await asyncio.sleep(health.interval)
