"""Make the layer of the agent that a recipe names: a directory as it is, or a self-contained Python package.

A package's layer has its own interpreter and libraries, and needs nothing of its base. `tree.py` packs a
layer; `cache.py` keeps it.
"""

from __future__ import annotations

import base64
import csv
import io
import re
import shutil
from collections.abc import Awaitable, Callable
from hashlib import file_digest, sha256
from pathlib import Path

import msgspec

from ...core.errors import BadInput, ImageFailed
from ...core.image import AgentSource, ImageLayer
from ...core.records import Record
from .cache import LayerCache, ScratchDirectory
from .installer import find_installer
from .interpreter import (
    PythonInterpreter,
    copy_interpreter,
    find_authorities,
    find_machine_bundle,
    link_tree,
)
from .interpreter_search import find_interpreter
from .package_parts import PackageParts, PartsGathering, find_checkout, locate_errors
from .program import CancelCheck, ProgramRunner, run_in_thread
from .tree import MTIME, check_prefix, identify, pack

# Writes the agent's files into a directory; returns the digest of their image, or an empty text.
FetchFiles = Callable[[AgentSource, Path], Awaitable[str]]
FORMAT = 1  # increase it when the same inputs give a different layer
COMPILING = 1800.0  # seconds
VERSION = 60.0  # seconds
LONGEST_PREFIX = 100  # bytes: older kernels allow 127 in a script's first line
CERTIFICATES = "etc/ssl/cert.pem"
ENVIRONMENT = {
    "SOURCE_DATE_EPOCH": str(MTIME),
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": "",
    "NO_COLOR": "1",
    "TZ": "UTC",
}
PLAIN_PATH = re.compile(r"(/[A-Za-z0-9._+-]+)+")
INSTALL_TRACES = ("direct_url.json", "uv_cache.json", "uv_build.json")  # where a package came from, and when
# A script's first line; or, for an interpreter with a long path, the three lines that start it by a shell.
SHEBANG = re.compile(rb"\A#!(/bin/sh\n'''exec' [^\n]*\n' '''|[^\n]*python[^\n]*)\n")


class PackagedAgent(Record, frozen=True):
    """The agent's layer, ready to be put on a base."""

    layer: ImageLayer
    env: dict[str, str] = msgspec.field(default_factory=dict)  # variables that the agent's files need
    origin: str = ""  # the digest of the image that the files came from


async def prepare_agent(
    source: AgentSource, cache: LayerCache, log: Path, fetch: FetchFiles | None = None
) -> PackagedAgent:
    """Return the layer of `source`, from the cache or newly built. `log` receives the output of the build."""
    prefix = check_prefix(source.prefix)
    try:
        if source.directory is not None:
            return PackagedAgent(layer=await _pack_directory(Path(source.directory), prefix, cache))
        if source.image is not None or source.stage is not None:
            return await _pack_image(source, prefix, cache, fetch)
        if source.source is None and source.package is None:
            raise BadInput("the agent has no files: it names no source")
        env = {"SSL_CERT_FILE": f"{prefix}/{CERTIFICATES}"}
        return PackagedAgent(layer=await _package_agent(source, cache, log), env=env)
    except OSError as e:
        raise ImageFailed(f"the agent's layer could not be made: {e}", kind="layer") from e


async def _pack_directory(directory: Path, prefix: str, cache: LayerCache) -> ImageLayer:
    if not directory.is_dir():
        raise BadInput(f"the agent's directory does not exist: `{directory}`")
    identity = await run_in_thread(lambda check: identify(directory, prefix, check))

    async def build(scratch: ScratchDirectory) -> ImageLayer:
        return await run_in_thread(lambda check: pack(directory, prefix, scratch.path / "layer", check))

    return await cache.get(sha256(f"directory {identity}".encode()).hexdigest(), build)


async def _pack_image(
    source: AgentSource, prefix: str, cache: LayerCache, fetch: FetchFiles | None
) -> PackagedAgent:
    if fetch is None:
        raise BadInput("no engine here can extract files from an image")
    async with cache.scratch() as scratch:
        files = scratch.path / "files"
        files.mkdir()
        digest = await fetch(source, files)
        return PackagedAgent(layer=await _pack_directory(files, prefix, cache), origin=digest)


async def _package_agent(source: AgentSource, cache: LayerCache, log: Path) -> ImageLayer:
    """Return the layer of a project or requirement, from the cache or newly built."""
    checkout = await run_in_thread(lambda check: find_checkout(source))
    patchelf = shutil.which("patchelf")
    if patchelf is None:
        raise BadInput("program not found: `patchelf`", "install `patchelf`")
    if not PLAIN_PATH.fullmatch(source.prefix) or len(source.prefix) > LONGEST_PREFIX:
        hint = f"letters, digits and `._+-/`, at most {LONGEST_PREFIX} characters: `/opt/agent`, for example"
        raise BadInput(f"invalid prefix for a Python package: `{source.prefix}`", hint)
    async with cache.scratch() as scratch:
        programs = ProgramRunner(log, scratch.path, keep=[scratch.lock], env=ENVIRONMENT)
        with locate_errors(source, "python"):
            interpreter = await find_interpreter(programs, source.python)
        with locate_errors(source, "source"):
            gathering = PartsGathering(programs, interpreter, scratch.path, cache.directory)
            parts = await gathering.gather_parts(source, checkout)
        building = _PackageBuild(source.prefix, parts, interpreter, patchelf, log)
        bundle = find_machine_bundle()
        certificates = sha256(bundle.read_bytes()).hexdigest() if bundle else ""
        tools = [await programs.run([patchelf, "--version"], VERSION), interpreter.identity, parts.installer]
        files = [parts.identity, source.package or "", parts.pins]
        inputs = [FORMAT, *files, source.prefix, tools, certificates]
        key = sha256(msgspec.json.encode(inputs)).hexdigest()
        return await cache.get(key, lambda place: building.run(place, scratch))


class _PackageBuild:
    """The build of one package's layer."""

    def __init__(
        self,
        prefix: str,
        parts: PackageParts,
        interpreter: PythonInterpreter,
        patchelf: str,
        log: Path,
    ) -> None:
        self._prefix = prefix
        self._parts = parts
        self._interpreter = interpreter
        self._patchelf = patchelf
        self._log = log

    async def run(self, scratch: ScratchDirectory, outer: ScratchDirectory) -> ImageLayer:
        tree, prefix = scratch.path / "tree", self._prefix
        library = tree / self._interpreter.folder
        keep = [scratch.lock, outer.lock]
        programs = ProgramRunner(self._log, scratch.path, keep, ENVIRONMENT)
        await run_in_thread(lambda check: copy_interpreter(self._interpreter, tree, check))
        installing = ProgramRunner(self._log, self._parts.directory or scratch.path, keep, ENVIRONMENT)
        await self._install(installing, scratch.path, tree)
        await run_in_thread(lambda check: self._finish(tree, library, check))
        await link_tree(programs, self._patchelf, self._interpreter, tree, prefix)
        await run_in_thread(lambda check: write_records(library, check))
        await self._compile(programs, tree, library)
        await run_in_thread(lambda check: normalize_modes(tree, check))
        return await run_in_thread(lambda check: pack(tree, prefix, scratch.path / "layer", check))

    async def _install(self, programs: ProgramRunner, scratch: Path, tree: Path) -> None:
        installer = await find_installer(programs, self._interpreter)
        parts, wheels = self._parts, []
        if parts.project is not None:
            wheels = [await installer.build_wheel(parts.project, scratch / "wheels")]
        pins = scratch / "pins.txt"
        pins.write_text("".join(f"{pin}\n" for pin in parts.pins))
        await installer.install(pins, [*parts.options, *wheels], tree)

    def _finish(self, tree: Path, library: Path, check: CancelCheck) -> None:
        bundle = tree / CERTIFICATES
        bundle.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(find_authorities(library), bundle)
        clean_tree(tree, library, self._prefix, check)

    async def _compile(self, programs: ProgramRunner, tree: Path, library: Path) -> None:
        """Compile to byte code that does not check source times.

        One process compiles all files, since byte code depends on the files compiled before.
        """
        options = ["-qq", "-f", "-j", "1", "--invalidation-mode", "unchecked-hash"]
        paths = ["-s", str(tree), "-p", self._prefix, str(library)]
        no_directory = ["-P"] if self._interpreter.version >= (3, 11) else []
        python = [str(self._interpreter.executable), "-s", "-S", "-B", *no_directory, "-m", "compileall"]
        # Status 1 is fine: a package may hold a `.py` file that is not valid Python, such as a template.
        await programs.run([*python, *options, *paths], COMPILING, statuses=(0, 1))


def clean_tree(tree: Path, library: Path, prefix: str, check: CancelCheck) -> None:
    """Remove install traces, rewrite shebangs and normalize modes, after packages were installed."""
    (tree / ".lock").unlink(missing_ok=True)  # from uv
    for information in library.glob("site-packages/*.dist-info"):
        for name in INSTALL_TRACES:
            (information / name).unlink(missing_ok=True)
    for script in (tree / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            _rewrite_shebang(script, prefix)
    normalize_modes(tree, check)


def normalize_modes(tree: Path, check: CancelCheck) -> None:
    """Make all files readable for all users and writable for the owner, independent of the umask."""
    for path in tree.rglob("*"):
        check()
        if not path.is_symlink():
            executable = path.is_dir() or path.stat().st_mode & 0o111
            path.chmod(0o755 if executable else 0o644)
    tree.chmod(0o755)


def write_records(library: Path, check: CancelCheck) -> None:
    """Rewrite each package's `RECORD` to match its files as they are now."""
    for record in library.glob("site-packages/*.dist-info/RECORD"):
        check()
        with record.open(newline="") as file:
            names = sorted(row[0] for row in csv.reader(file) if row)
        written = io.StringIO(newline="")
        csv.writer(written, lineterminator="\n").writerows(
            _record_row(library / "site-packages", name)
            for name in names
            if (library / "site-packages" / name).exists()
        )
        record.write_text(written.getvalue())


def _rewrite_shebang(script: Path, prefix: str) -> None:
    with script.open("rb") as file:
        if file.read(2) != b"#!":
            return
    content = script.read_bytes()
    script.write_bytes(SHEBANG.sub(f"#!{prefix}/bin/python\n".encode(), content, count=1))


def _record_row(site: Path, name: str) -> tuple[str, str, str]:
    path = site / name
    if path.name == "RECORD" or not path.is_file():
        return name, "", ""
    with path.open("rb") as file:
        digest = base64.urlsafe_b64encode(file_digest(file, "sha256").digest()).rstrip(b"=").decode()
    return name, f"sha256={digest}", str(path.stat().st_size)
