"""A sandbox of ours as a runtime of verifiers: hooks and rewards of a task run their commands in it.

Only `package.py` and `scoring.py` import this module: it needs the package.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import PurePosixPath
from typing import Any, Literal

import verifiers.v1 as vf
from verifiers.v1.runtimes import BaseRuntimeInfo

from ...core.authoring import Sandbox
from ...core.errors import SandboxFailed
from .tool_servers import NO_ANSWER

# The block of a script that names its packages (PEP 723).
SCRIPT_BLOCK = re.compile(r"(?m)^# /// script\n((?:#.*\n)*?)# ///$")
LONGEST_REASON = 2000
COPY = 'mkdir -p "$(dirname "$2")" && cp "$1" "$2"'
ROOT = "root"  # runs a task's hooks, if the agent has a user of its own


class SandboxRuntimeConfig(vf.BaseConfig):  # type: ignore[misc]
    type: Literal["holdwater"] = "holdwater"


class SandboxRuntimeInfo(SandboxRuntimeConfig, BaseRuntimeInfo):  # type: ignore[misc]
    pass


class SandboxRuntime(vf.Runtime):  # type: ignore[misc]
    """The sandbox of one attempt, until the attempt ends. The attempt starts and stops it."""

    supports_user = True

    def __init__(
        self,
        sandbox: Sandbox,
        name: str,
        env: Mapping[str, str],
        agent_user: str | None,
        *,
        as_agent: bool = False,
    ) -> None:
        super().__init__(name)
        self.config = SandboxRuntimeConfig()
        self.info = SandboxRuntimeInfo(id=name)
        self.env = dict(env)
        self.launcher: Sequence[str] = ()  # what starts a harness's program: tool servers start before it
        self._sandbox = sandbox
        self._default_user = ROOT if agent_user is not None and not as_agent else None

    async def start(self) -> None:
        return

    def cleanup(self) -> None:
        return

    async def run(self, argv: Sequence[str], env: Mapping[str, str]) -> Any:
        user = self.user or self._default_user
        result = await self._sandbox.run(list(argv), env=self.process_env(dict(env)), user=user)
        return vf.ProgramResult(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None:
            found: bytes = await super()._read(self._locate(path), max_bytes)
            return found
        return await self._sandbox.read(path)

    async def write(self, path: str, data: bytes) -> None:
        if self._reaches(path):
            await self._sandbox.write(path, data)
        else:  # a process sandbox lets commands alone write there
            staged = f"{self._sandbox.private}/vf-{secrets.token_hex(8)}"
            await self._sandbox.write(staged, data)
            copied = await self.run(["sh", "-c", COPY, "sh", staged, path], {})
            if copied.exit_code:
                raise SandboxFailed(f"cannot write `{path}`: {copied.stderr.strip()}", kind="files")
        if self.user is not None:
            await self.run(["chown", self.user, self._locate(path)], {})

    async def run_program(self, argv: Sequence[str], env: Mapping[str, str]) -> Any:
        result = await self.run([*self.launcher, *argv], env)
        if self.launcher and result.exit_code == NO_ANSWER:
            raise SandboxFailed(result.stderr.strip()[-LONGEST_REASON:], kind="tools")
        return result

    async def prepare_uv_script(
        self, script: str | bytes, env: Mapping[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        """Return the words that run a script: with our own interpreter, where the sandbox shows it.

        Elsewhere `uv` installs its packages in the sandbox, which needs a network.
        """
        if not (await self.run(["test", "-x", sys.executable], {})).exit_code and has_packages(script):
            data = script.encode() if isinstance(script, str) else script
            path = f"{self._sandbox.private}/{hashlib.sha256(data).hexdigest()[:16]}.py"
            await self._sandbox.write(path, data)
            return [sys.executable, path]
        words: list[str] = await super().prepare_uv_script(script, env, activate=activate)
        return words

    def _reaches(self, path: str) -> bool:
        places = (self._sandbox.workdir, self._sandbox.private)
        return any(PurePosixPath(self._locate(path)).is_relative_to(place) for place in places)

    def _locate(self, path: str) -> str:
        return str(PurePosixPath(self._sandbox.workdir, path))


def has_packages(script: str | bytes) -> bool:
    """Return whether this interpreter has the packages that a script names."""
    from packaging.requirements import Requirement

    text = script.decode() if isinstance(script, bytes) else script
    block = SCRIPT_BLOCK.search(text)
    named = tomllib.loads(re.sub(r"(?m)^# ?", "", block[1])).get("dependencies", []) if block else []
    try:
        return all(
            Requirement(line).specifier.contains(metadata.version(Requirement(line).name), prereleases=True)
            for line in named
        )
    except metadata.PackageNotFoundError:
        return False
