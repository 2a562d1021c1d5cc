"""Copy a uv project and let uv read its lock: the result is the exact list of packages to install.

Versions and hashes come from the lock alone, and the packages from the indexes of this machine.
`uv_checkout.py` finds the files, and `installer.py` installs the list.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from collections import Counter
from pathlib import Path

import msgspec

from ...core.errors import BadInput, ImageFailed
from .installer import RESOLVING, Pins, find_uv
from .program import SECRET, CancelCheck, ProgramRunner, run_in_thread
from .project_copy import copy_project
from .tree import identify
from .uv_checkout import LOCK, UvCheckout

GIT_PIN = re.compile(r"^(\S+) @ (git\+\S+)", re.MULTILINE)


class _LockedSource(msgspec.Struct):
    registry: str = ""


class _LockedPackage(msgspec.Struct):
    source: _LockedSource = msgspec.field(default_factory=_LockedSource)


class _LockFile(msgspec.Struct):
    """The part of a `uv.lock` that names the indexes."""

    package: list[_LockedPackage] = msgspec.field(default_factory=list)


class UvProject:
    """A copy of a checkout."""

    def __init__(self, checkout: UvCheckout, copy: Path) -> None:
        self._checkout = checkout
        self._copy = copy
        self.root = copy / checkout.root.relative_to(checkout.top)

    async def copy_files(self, cache: Path) -> str:
        """Copy all files; return their identity, which does not depend on where the checkout is."""
        await run_in_thread(lambda check: self._copy_files(cache, check))
        return await run_in_thread(lambda check: identify(self._copy, "/project", check))

    async def read_pins(self, programs: ProgramRunner, python: Path, extras: tuple[str, ...]) -> Pins:
        """Return the lines of a requirements file: exact versions with hashes, and the local packages."""
        uv = find_uv() or "uv"  # `package_parts.find_checkout` has looked for it
        reader = _LockReader(self._checkout, self.root, programs, uv, python)
        return await reader.read_pins(extras)

    def list_install_options(self) -> tuple[str, ...]:
        """Return the options for the indexes of the project that its lock uses.

        Hashes decide which file is right, so any index may serve a package.
        """
        named = _count_indexes(self.root / LOCK)
        used = [word for url in self._checkout.indexes if url in named for word in ("--index", url)]
        return (*used, "--index-strategy", "unsafe-best-match") if used else ()

    def _copy_files(self, cache: Path, check: CancelCheck) -> None:
        top = self._checkout.top
        self._copy.mkdir()
        for directory in self._checkout.directories:
            target = self._copy / directory.relative_to(top)
            if target == self._copy:
                target.rmdir()
            target.parent.mkdir(parents=True, exist_ok=True)
            copy_project(directory, target, cache, check)
        for file in self._checkout.files:
            target = self._copy / file.relative_to(top)
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)


class _LockReader:
    """Runs uv on the copy of a checkout."""

    def __init__(
        self, checkout: UvCheckout, copy: Path, programs: ProgramRunner, uv: str, python: Path
    ) -> None:
        self._checkout = checkout
        self._lock = checkout.root / LOCK
        self._pins = copy / "pins-of-the-lock.txt"
        self._git_file = copy / "git-source.in"
        self._programs = programs
        self._uv = uv
        self._options = ["--directory", str(copy), "--python", str(python)]

    async def read_pins(self, extras: tuple[str, ...]) -> Pins:
        if not self._checkout.is_locked:
            await self._run(["lock", "--quiet"], f"uv cannot lock `{self._checkout.root}`")
        package = ["--package", self._checkout.name] if self._checkout.name else ["--all-packages"]
        wanted = [*package, *(word for extra in extras for word in ("--extra", extra))]
        options = ["--no-default-groups", "--no-editable", "--no-header", "--no-annotate", "--quiet"]
        checked = ["--frozen"]
        if self._checkout.is_locked:
            checked = ["--locked", *_list_lock_options(self._lock, self._checkout.indexes)]
        words = ["export", *wanted, *options, *checked, "--output-file", self._pins.name]
        await self._run(words, f"`{self._lock}` cannot be honoured")
        exported = self._pins.read_text("utf-8")
        await self._check_git_sources(exported)
        return tuple(line for line in exported.splitlines() if line.strip())

    async def _check_git_sources(self, pins: str) -> None:
        """Fetch git sources now, so that nothing is built in vain; uv keeps them for the build."""
        for name, address in GIT_PIN.findall(pins):
            self._git_file.write_text(f"{name} @ {address}\n")
            shown = SECRET.sub(b"***", address.encode()).decode()
            problem = f"`{self._lock}`: the git source `{name}` cannot be fetched: `{shown}`"
            await self._run(["pip", "compile", "--quiet", "--no-deps", str(self._git_file)], problem)

    async def _run(self, words: list[str], problem: str) -> str:
        try:
            return await self._programs.run([self._uv, *words, *self._options], RESOLVING)
        except ImageFailed as error:
            reason = error.message.partition("\n")[2].strip()
            if "needs to be updated" in reason:
                hint = f"`uv lock --directory {self._checkout.root}`"
                raise BadInput(f"`{self._lock}` is out of date", hint) from error
            hint = "the recipe's `python` selects another one" if "Python requirement" in reason else ""
            raise BadInput(f"{problem}: {reason}", hint) from error


def _count_indexes(lock: Path) -> Counter[str]:
    """Return the addresses of the indexes that a lock names, with the number of packages of each."""
    try:
        packages = msgspec.convert(tomllib.loads(lock.read_text("utf-8")), _LockFile).package
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise BadInput(f"`{lock}`: not a lock of uv: {error}") from None
    return Counter(package.source.registry.rstrip("/") for package in packages if package.source.registry)


def _list_lock_options(lock: Path, declared: tuple[str, ...]) -> list[str]:
    """Return the options that make uv accept a lock from other indexes than those of this machine.

    uv takes a lock as out of date if it names an index that is not configured, such as PyPI behind a mirror.
    """
    others = [url for url, _ in _count_indexes(lock).most_common() if "://" in url and url not in declared]
    if not others:
        return []
    return ["--default-index", others[0], *(word for url in others[1:] for word in ("--index", url))]
