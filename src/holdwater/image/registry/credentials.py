"""Find the login for a registry in docker's `config.json` and the credential helpers that it names.

Secrets leave this module only in a `RegistryLogin`, whose repr hides them. `tokens.py` uses the logins.
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

from ...core.environment import build_environment
from ...core.errors import BadInput, ImageFailed
from .reference import DOCKER_HUB

HELPER_SECONDS = 30.0
LARGEST_ANSWER = 64 * 1024  # bytes of a helper's output
_HUB_KEY = "https://index.docker.io/v1/"  # docker's key for its own registry in the configuration
_HUB_NAMES = (_HUB_KEY, "index.docker.io", DOCKER_HUB, "registry-1.docker.io")
_NOT_FOUND = b"credentials not found"  # the output of docker's own helpers, which others follow
_IDENTITY = "<token>"  # the user name that marks the secret as an identity token


class RegistryLogin:
    """A user and a password, or an identity token. Its repr hides them."""

    __slots__ = ("identity", "password", "username")

    def __init__(self, username: str, password: str, identity: str = "") -> None:
        self.username = username
        self.password = password
        self.identity = identity

    def __repr__(self) -> str:
        return "RegistryLogin(...)"

    @property
    def basic(self) -> str:
        """The value of the `Authorization` header."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secrets to remove from texts, in every form in which they are sent."""
        return tuple(filter(None, (self.password, self.identity, self.basic.removeprefix("Basic "))))


class RegistryCredentials:
    """The logins of all registries. Reads `config` at the first request; `search` is the PATH for helpers.

    Helpers get the operator's `variables`, since many read cloud credentials from them.
    """

    def __init__(
        self, config: Path | None, search: str = "", variables: Mapping[str, str] | None = None
    ) -> None:
        self._path = config
        self._search = search
        self._variables = build_environment(PATH=search) if variables is None else variables
        self._config: dict[str, Any] | None = None
        self._lock = asyncio.Lock()  # concurrent requests share one call of a helper
        self._logins: dict[str, RegistryLogin | None] = {}  # bound: the registries in use

    async def find_login(self, registry: str) -> RegistryLogin | None:
        """Return the login for a registry; None: anonymous. The result is cached in this object."""
        async with self._lock:
            if registry not in self._logins:
                self._logins[registry] = await self._load_login(registry)
            return self._logins[registry]

    async def _load_login(self, registry: str) -> RegistryLogin | None:
        if self._config is None:
            self._config = self._read_config()
        config = self._config
        names = _HUB_NAMES if registry == DOCKER_HUB else (registry,)
        helpers = self._get_section(config, "credHelpers")
        helper = next((helpers[name] for name in names if name in helpers), config.get("credsStore"))
        if helper:
            login = await self._ask_helper(str(helper), names[0])
            if login is not None:
                return login
        for key, entry in self._get_section(config, "auths").items():
            if key in names or _key_host(key) in names:
                return self._parse_login(key, entry)
        return None

    def _read_config(self) -> dict[str, Any]:
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
        if not isinstance(config, dict):  # the decoder's error could show the content
            raise BadInput(f"docker's configuration is not a JSON object: {self._path}")
        return config

    def _get_section(self, config: dict[str, Any], name: str) -> dict[str, Any]:
        section = config.get(name) or {}
        if not isinstance(section, dict):
            raise BadInput(f"docker's configuration has a `{name}` that is not an object: {self._path}")
        return section

    def _parse_login(self, key: str, entry: Any) -> RegistryLogin | None:
        if not isinstance(entry, dict) or any(not isinstance(value, str) for value in entry.values()):
            raise BadInput(f"docker's configuration has an invalid entry in `auths`: `{key}`: {self._path}")
        username, password = entry.get("username", ""), entry.get("password", "")
        if entry.get("auth"):
            username, password = self._decode_auth(key, entry["auth"])
        if entry.get("identitytoken"):
            return RegistryLogin(username, "", entry["identitytoken"])
        return RegistryLogin(username, password) if username and password else None

    def _decode_auth(self, key: str, auth: str) -> tuple[str, str]:
        try:
            username, colon, password = base64.b64decode(auth, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            colon = ""
        if not colon:
            raise BadInput(f"docker's configuration has an invalid `auth` for `{key}`: {self._path}")
        return username, password.rstrip("\0")

    async def _ask_helper(self, helper: str, server: str) -> RegistryLogin | None:
        name = f"docker-credential-{helper}"
        program = shutil.which(name, path=self._search)
        if "/" in helper or program is None:
            raise BadInput(
                f"docker's configuration names a helper that does not exist: `{name}`: {self._path}"
            )
        status, printed = await _run_helper(program, server, self._variables)
        if status != 0:
            if _NOT_FOUND in printed:
                return None
            raise _helper_error(name, server, f"exit status {status}")
        try:
            answer = msgspec.json.decode(printed)
            username, secret = str(answer["Username"]), str(answer["Secret"])
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
            answer = None
        if answer is None:
            raise _helper_error(name, server, "its output is not in the format of docker's helpers")
        return RegistryLogin("", "", secret) if username == _IDENTITY else RegistryLogin(username, secret)


async def _run_helper(program: str, server: str, variables: Mapping[str, str]) -> tuple[int, bytes]:
    """Run a helper; return its exit status and output. The process is gone on return and on an error."""
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
        raise _helper_error(Path(program).name, server, f"it cannot be started: {error.strerror}") from None
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(HELPER_SECONDS):
            process.stdin.write(server.encode())
            process.stdin.close()
            printed = await _read_output(process.stdout)
            if len(printed) <= LARGEST_ANSWER:
                return await process.wait(), printed
        why = f"it printed more than {LARGEST_ANSWER} bytes"
    except TimeoutError:
        why = f"no output within {HELPER_SECONDS:g} s"
    finally:
        if process.returncode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # with its children: they may hold its output open
            except ProcessLookupError:
                pass  # the helper has just ended
            await process.wait()
    raise _helper_error(Path(program).name, server, why)


async def _read_output(stdout: asyncio.StreamReader) -> bytes:
    printed = b""
    while len(printed) <= LARGEST_ANSWER and (piece := await stdout.read(LARGEST_ANSWER)):
        printed += piece
    return printed


def _helper_error(name: str, server: str, why: str) -> ImageFailed:
    """Return the error of a helper, without its output, which may be a secret."""
    hint = f"try it: `echo {server} | {name} get`"
    return ImageFailed(f"the credential helper `{name}` failed for `{server}`: {why}", hint, kind="denied")


def _key_host(key: str) -> str:
    """Return the registry of a key in `auths`; some keys are URLs."""
    return key.partition("://")[2].partition("/")[0] if "://" in key else key.partition("/")[0]
