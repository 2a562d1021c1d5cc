"""Gather what a Python agent is installed from: exact versions, and copies of its own projects.

`uv_project.py` does it for a project that only uv understands. `agent_layer.py` installs the parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...core.errors import BadInput
from ...core.image import AgentSource
from ...core.records import Record
from .installer import Pins, find_installer, find_uv
from .interpreter import PythonInterpreter
from .program import ProgramRunner, run_in_thread
from .project_copy import copy_project
from .tree import identify
from .uv_checkout import UvCheckout, read_uv_checkout
from .uv_project import UvProject


class PackageParts(Record, frozen=True):
    """The packages to install."""

    identity: str  # of all local files
    pins: Pins
    installer: str  # the name of the program that installs
    project: Path | None = None  # a project whose wheel is built and installed beside the pins
    directory: Path | None = None  # the pins name local packages relative to this directory
    options: tuple[str, ...] = ()  # of the installer


@contextmanager
def locate_errors(source: AgentSource, field: str) -> Iterator[None]:
    """Put the place of a recipe's field in front of an error's message."""
    try:
        yield
    except BadInput as error:
        if place := source.places.get(field):
            raise BadInput(f"{place}: `agent.{field}`: {error.message}", error.hint) from error
        raise


def find_checkout(source: AgentSource) -> UvCheckout | None:
    """Return the uv project that the agent is made of; None: it is not made of one. Blocks."""
    if source.source is None:
        return None
    with locate_errors(source, "source"):
        checkout = read_uv_checkout(Path(source.source))
        if checkout is not None and find_uv() is None:
            raise BadInput(f"`{checkout.root}` is a uv project, and `uv` was not found", "install `uv`")
        return checkout


class PartsGathering:
    """Resolves and copies the parts of one agent into a scratch directory."""

    def __init__(
        self, programs: ProgramRunner, interpreter: PythonInterpreter, scratch: Path, cache: Path
    ) -> None:
        self._programs = programs
        self._interpreter = interpreter
        self._scratch = scratch
        self._copy = scratch / "project"  # a build may write to the copy
        self._cache = cache

    async def gather_parts(self, source: AgentSource, checkout: UvCheckout | None) -> PackageParts:
        installer = await find_installer(self._programs, self._interpreter)
        if source.source is None:
            pins = await installer.resolve(source.package or "", self._scratch)
            return PackageParts(identity="", pins=pins, installer=installer.name)
        if checkout is not None:
            return await self._gather_checkout(checkout, source.extras, installer.name)
        project, copy = Path(source.source), self._copy
        await run_in_thread(lambda check: copy_project(project, copy, self._cache, check))
        identity = await run_in_thread(lambda check: identify(copy, "/project", check))
        pins = await installer.resolve(copy, self._scratch, source.extras)
        return PackageParts(identity=identity, pins=pins, installer=installer.name, project=copy)

    async def _gather_checkout(
        self, checkout: UvCheckout, extras: tuple[str, ...], installer: str
    ) -> PackageParts:
        project = UvProject(checkout, self._copy)
        return PackageParts(
            identity=await project.copy_files(self._cache),
            pins=await project.read_pins(self._programs, self._interpreter.executable, extras),
            installer=installer,
            directory=project.root,
            options=project.list_install_options(),
        )
