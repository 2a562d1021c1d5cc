"""A Python project or requirement as a layer that needs nothing of its base: interpreter, libraries and all.

The steps are in `installer.py`, `interpreter.py`, `linking.py` and `tidy.py`; `cache.py` keeps the result.
"""

from __future__ import annotations

import re
import shutil
import stat
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path

import msgspec

from ...core.errors import BadInput
from ...core.image import Layer
from ...core.records import Record
from ...ledger.prune import is_run
from .cache import LayerCache, Scratch
from .installer import Pins, find_installer
from .interpreter import Interpreter, authorities, copy_interpreter, machine_bundle, running
from .linking import link
from .program import Programs, needed
from .thread import Check, in_thread
from .tidy import level, tidy, write_records
from .tree import MTIME, identify, pack

FORMAT = 1  # raised when the same inputs give another layer
COMPILING = 1800.0  # seconds
VERSION = 60.0  # seconds
LONGEST_PREFIX = 100  # bytes: a script's first line may have 127 on older kernels
CERTIFICATES = "etc/ssl/cert.pem"
ENVIRONMENT = {
    "SOURCE_DATE_EPOCH": str(MTIME),
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": "",
    "NO_COLOR": "1",
    "TZ": "UTC",
}
SKIPPED = ("__pycache__", ".git", ".hg", ".venv", "*.egg-info", ".tox", ".nox", ".*_cache")
SKIPPED_AT_THE_TOP = ("build", "dist", "venv")
PLAIN = re.compile(r"(/[A-Za-z0-9._+-]+)+")


class Asked(Record, frozen=True):
    """What is to be packaged, and for where: a project's directory or a requirement."""

    prefix: str
    project: Path | None = None
    requirement: str = ""


async def package(asked: Asked, cache: LayerCache, log: Path) -> Layer:
    """The layer of what is asked for, built unless it is in the cache."""
    patchelf = needed("patchelf", shutil.which("patchelf"), "install `patchelf`")
    _check_prefix(asked.prefix)
    interpreter = running()
    async with cache.scratch() as scratch:
        programs = Programs(log, scratch.path, keep=[scratch.lock], env=ENVIRONMENT)
        tools = [await programs.run([patchelf, "--version"], VERSION), interpreter.identity]
        source = ""
        if asked.project is not None:
            asked, source = await _copied(asked, asked.project, scratch.path / "project", cache.directory)
        installer = await find_installer(programs, interpreter)
        pins = await installer.resolve(asked.project or asked.requirement, scratch.path)
        building = _Building(asked, pins, interpreter, patchelf, log)
        key = _key(asked, source, pins, [*tools, installer.name])
        return await cache.get(key, lambda place: building.run(place, scratch))


def environment(prefix: str) -> dict[str, str]:
    """What the agent's environment has to say for the layer to work."""
    return {"SSL_CERT_FILE": f"{prefix}/{CERTIFICATES}"}


def copy_project(project: Path, into: Path, cache: Path, check: Check) -> None:
    """A project without what is made from it; what its links point to outside of it comes along. Blocks."""
    project, cache = project.resolve(), cache.resolve()

    def skipped(directory: str, names: list[str]) -> list[str]:
        check()
        patterns = SKIPPED + (SKIPPED_AT_THE_TOP if Path(directory) == project else ())
        paths = [Path(directory) / name for name in names]
        return [p.name for p in paths if _skipped(p, patterns) or p == cache or is_run(p)]

    if not project.is_dir():
        raise BadInput(f"the agent's source is no directory: `{project}`")
    shutil.copytree(project, into, symlinks=True, ignore=skipped)
    for path in sorted(into.rglob("*")):
        if path.is_symlink():
            _follow(path, project / path.relative_to(into), project)


def _follow(path: Path, original: Path, project: Path) -> None:
    """In place of a link that leads out of a project: what it leads to."""
    target = original.resolve()
    if target.is_relative_to(project) and not original.readlink().is_absolute():
        return
    path.unlink()
    if target.is_dir() and not project.is_relative_to(target):
        shutil.copytree(target, path, symlinks=True)
    elif target.is_file():
        shutil.copy2(target, path)


async def _copied(asked: Asked, project: Path, copy: Path, cache: Path) -> tuple[Asked, str]:
    """The same with a copy of the project, which a build may write to, and what the copy holds."""
    await in_thread(lambda check: copy_project(project, copy, cache, check))
    source = await in_thread(lambda check: identify(copy, "/project", check))
    return msgspec.structs.replace(asked, project=copy), source


class _Building:
    """One build."""

    def __init__(self, asked: Asked, pins: Pins, interpreter: Interpreter, patchelf: str, log: Path) -> None:
        self._asked = asked
        self._pins = pins
        self._interpreter = interpreter
        self._patchelf = patchelf
        self._log = log

    async def run(self, scratch: Scratch, outer: Scratch) -> Layer:
        tree, prefix = scratch.path / "tree", self._asked.prefix
        library = tree / self._interpreter.folder
        programs = Programs(self._log, scratch.path, keep=[scratch.lock, outer.lock], env=ENVIRONMENT)
        await in_thread(lambda check: copy_interpreter(self._interpreter, tree, check))
        await self._install(programs, scratch.path, tree)
        await in_thread(lambda check: self._finish(tree, library, check))
        await link(programs, self._patchelf, self._interpreter, tree, prefix)
        await in_thread(lambda check: write_records(library, check))
        await self._compile(programs, tree, library)
        await in_thread(lambda check: level(tree, check))
        return await in_thread(lambda check: pack(tree, prefix, scratch.path / "layer", check))

    async def _install(self, programs: Programs, scratch: Path, tree: Path) -> None:
        installer = await find_installer(programs, self._interpreter)
        wheels = []
        if self._asked.project is not None:
            wheels = [await installer.wheel(self._asked.project, scratch / "wheels")]
        pins = scratch / "pins.txt"
        pins.write_text("".join(f"{pin}\n" for pin in self._pins))
        await installer.install(pins, wheels, tree)

    def _finish(self, tree: Path, library: Path, check: Check) -> None:
        bundle = tree / CERTIFICATES
        bundle.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(authorities(library), bundle)
        tidy(tree, library, self._asked.prefix, check)

    async def _compile(self, programs: Programs, tree: Path, library: Path) -> None:
        """Byte code that asks for no time of its source. In one process: it depends on what came before."""
        options = ["-qq", "-f", "-j", "1", "--invalidation-mode", "unchecked-hash"]
        paths = ["-s", str(tree), "-p", self._asked.prefix, str(library)]
        python = [str(self._interpreter.executable), "-s", "-S", "-B", "-P", "-m", "compileall"]
        # A package may hold a file that is no Python, such as a template: that is not ours to judge.
        await programs.run([*python, *options, *paths], COMPILING, statuses=(0, 1))


def _key(asked: Asked, source: str, pins: Pins, tools: list[str]) -> str:
    bundle = machine_bundle()
    certificates = sha256(bundle.read_bytes()).hexdigest() if bundle else ""
    parts = [FORMAT, source, asked.requirement, pins, asked.prefix, tools, certificates]
    return sha256(msgspec.json.encode(parts)).hexdigest()


def _check_prefix(prefix: str) -> None:
    if not PLAIN.fullmatch(prefix) or len(prefix) > LONGEST_PREFIX:
        hint = f"letters, digits and `._+-/`, at most {LONGEST_PREFIX} characters: `/opt/agent`, for example"
        raise BadInput(f"a Python package cannot lie at this prefix: `{prefix}`", hint)


def _skipped(path: Path, patterns: tuple[str, ...]) -> bool:
    if any(fnmatch(path.name, pattern) for pattern in patterns):
        return True
    kind = stat.S_IFMT(path.lstat().st_mode)
    return kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)  # no part of a project
