"""Who we are to a registry: docker's `config.json`, and the credential helpers that it names.

Secrets leave this module in a `Login` alone, which does not print them. `tokens.py` uses it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...core.errors import BadInput, ImageFailed
from ...core.helper_environment import build_environment
from .reference import DOCKER_HUB

HELPER_SECONDS = 30.0
LARGEST_ANSWER = 64 * 1024  # bytes that a helper may print
_HUB_KEY = "https://index.docker.io/v1/"  # what docker calls its own registry in its configuration
_HUB_NAMES = (_HUB_KEY, "index.docker.io", DOCKER_HUB, "registry-1.docker.io")
_NOT_THERE = b"credentials not found"  # what helpers print, as docker's own do
_IDENTITY = "<token>"  # the user's name where the secret is an identity token


class Login:
    """A user and a password, or an identity token. It does not print them."""

    __slots__ = ("identity", "password", "username")

    def __init__(self, username: str, password: str, identity: str = "") -> None:
        self.username = username
        self.password = password
        self.identity = identity

    def __repr__(self) -> str:
        return "Login(...)"

    @property
    def basic(self) -> str:
        """The value of an `Authorization` header."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must be seen by nobody else, in every form that it is sent in."""
        return tuple(filter(None, (self.password, self.identity, self.basic.removeprefix("Basic "))))


class Credentials:
    """Reads `config` when it is first asked. `search` is a PATH: where helpers are looked for.

    Helpers get the operator's `variables`: many read credentials of a cloud there.
    """

    def __init__(
        self, config: Path | None, search: str = "", variables: Mapping[str, str] | None = None
    ) -> None:
        self._path = config
        self._search = search
        self._variables = build_environment(PATH=search) if variables is None else variables
        self._config: dict[str, Any] | None = None
        self._lock = asyncio.Lock()  # a helper is asked once, whoever waits for it
        self._told: dict[str, Login | None] = {}  # bound: the registries that are spoken to

    async def login(self, registry: str) -> Login | None:
        """Who we are to a registry; None: nobody. Asked once for the life of this object."""
        async with self._lock:
            if registry not in self._told:
                self._told[registry] = await self._found(registry)
            return self._told[registry]

    async def _found(self, registry: str) -> Login | None:
        config = self._read()
        names = _HUB_NAMES if registry == DOCKER_HUB else (registry,)
        helpers = self._section(config, "credHelpers")
        helper = next((helpers[name] for name in names if name in helpers), config.get("credsStore"))
        if helper:
            login = await self._helped(str(helper), names[0])
            if login is not None:
                return login
        for key, entry in self._section(config, "auths").items():
            if key in names or _host(key) in names:
                return self._login(key, entry)
        return None

    def _read(self) -> dict[str, Any]:
        if self._config is None:
            self._config = self._parsed()
        return self._config

    def _parsed(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise BadInput(f"docker's configuration cannot be read: {self._path}: {error.strerror}") from None
        try:
            config = msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            config = None
        if not isinstance(config, dict):  # what is wrong with it is not said: it would show what is in it
            raise BadInput(f"docker's configuration is not a JSON object: {self._path}")
        return config

    def _section(self, config: dict[str, Any], name: str) -> dict[str, Any]:
        section = config.get(name) or {}
        if not isinstance(section, dict):
            raise BadInput(f"docker's configuration has a `{name}` that is no object: {self._path}")
        return section

    def _login(self, key: str, entry: Any) -> Login | None:
        if not isinstance(entry, dict) or any(not isinstance(value, str) for value in entry.values()):
            raise BadInput(f"docker's configuration is broken at `auths`, `{key}`: {self._path}")
        username, password = entry.get("username", ""), entry.get("password", "")
        if entry.get("auth"):
            username, password = self._decoded(key, entry["auth"])
        if entry.get("identitytoken"):
            return Login(username, "", entry["identitytoken"])
        return Login(username, password) if username and password else None

    def _decoded(self, key: str, auth: str) -> tuple[str, str]:
        try:
            username, colon, password = base64.b64decode(auth, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            colon = ""
        if not colon:
            raise BadInput(f"docker's configuration has a broken `auth` of `{key}`: {self._path}")
        return username, password.rstrip("\0")

    async def _helped(self, helper: str, server: str) -> Login | None:
        name = f"docker-credential-{helper}"
        program = shutil.which(name, path=self._search)
        if "/" in helper or program is None:
            raise BadInput(f"docker's configuration names a helper that is not there: `{name}`: {self._path}")
        status, printed = await _asked(program, server, self._variables)
        if status != 0:
            if _NOT_THERE in printed:
                return None
            raise _failed(name, server, f"exit status {status}")
        try:
            answer = msgspec.json.decode(printed)
            username, secret = str(answer["Username"]), str(answer["Secret"])
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
            answer = None
        if answer is None:
            raise _failed(name, server, "what it printed is not what docker's helpers print")
        return Login("", "", secret) if username == _IDENTITY else Login(username, secret)


async def _asked(program: str, server: str, variables: Mapping[str, str]) -> tuple[int, bytes]:
    """The helper's exit status and what it printed; it is gone when this returns, or is left by an error."""
    pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *(program, "get"),
            stdin=pipe,
            stdout=pipe,
            stderr=nowhere,
            env=variables,
            start_new_session=True,
        )
    except OSError as error:
        raise _failed(Path(program).name, server, f"it cannot be started: {error.strerror}") from None
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(HELPER_SECONDS):
            process.stdin.write(server.encode())
            process.stdin.close()
            printed = await _read(process.stdout)
            if len(printed) <= LARGEST_ANSWER:
                return await process.wait(), printed
        why = f"it printed more than {LARGEST_ANSWER} bytes"
    except TimeoutError:
        why = f"no answer in {HELPER_SECONDS:g} s"
    finally:
        if process.returncode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # with what it started: that may hold its output open
            except ProcessLookupError:
                pass  # it has ended by itself just now
            await process.wait()
    raise _failed(Path(program).name, server, why)


async def _read(stdout: asyncio.StreamReader) -> bytes:
    printed = b""
    while len(printed) <= LARGEST_ANSWER and (piece := await stdout.read(LARGEST_ANSWER)):
        printed += piece
    return printed


def _failed(name: str, server: str, why: str) -> ImageFailed:
    """What a helper printed is not repeated: it may be a secret."""
    hint = f"try it: `echo {server} | {name} get`"
    return ImageFailed(f"the credential helper `{name}` failed for `{server}`: {why}", hint, kind="denied")


def _host(key: str) -> str:
    """The registry that a key of `auths` means: some are URLs."""
    return key.partition("://")[2].partition("/")[0] if "://" in key else key.partition("/")[0]
