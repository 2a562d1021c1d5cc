"""A sandbox that is no more than a directory: for tests of suites and agents, which need no walls."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdwater.core.records import CommandResult, Instance


class Directory:
    """Runs commands in `base`; the same seam as `core.authoring.Sandbox`."""

    def __init__(self, base: Path) -> None:
        self.base = base

    @property
    def workdir(self) -> str:
        return str(self.base)

    @property
    def private(self) -> str:
        return f"{self.base}-private"

    async def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        log: Path | None = None,
    ) -> CommandResult:
        words = ["sh", "-c", command] if isinstance(command, str) else list(command)
        started = time.monotonic()
        pipe = asyncio.subprocess.PIPE
        try:
            child = await asyncio.create_subprocess_exec(
                *words,
                cwd=self.base,
                stdout=pipe,
                stderr=pipe,
                env={"PATH": os.environ["PATH"], **(env or {})},
            )
        except FileNotFoundError as error:
            return CommandResult(exit_code=127, stdout="", stderr=str(error))
        timed_out = False
        try:
            async with asyncio.timeout(timeout):
                out, err = await child.communicate()
        except TimeoutError:
            timed_out, out, err = True, b"", b""
            child.kill()
            await child.wait()
        return CommandResult(
            exit_code=child.returncode or 0,
            stdout=out.decode(errors="replace"),
            stderr=err.decode(errors="replace"),
            seconds=time.monotonic() - started,
            timed_out=timed_out,
        )

    async def read(self, path: str) -> bytes:
        return (self.base / path).read_bytes()

    async def write(self, path: str, content: str | bytes) -> None:
        target = self.base / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)


async def prepared(base: Path, instance: Instance) -> Directory:
    """The instance's directory and files, and its set-up, in a new directory."""
    if instance.directory is None:
        base.mkdir(parents=True)
    else:
        shutil.copytree(instance.directory, base)
    sandbox = Directory(base)
    for path, content in instance.files.items():
        await sandbox.write(path, content)
    if instance.setup:
        assert (await sandbox.run(instance.setup)).ok
    return sandbox
