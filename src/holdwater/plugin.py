"""Loads objects of the user by `path.py:name`, by `module:name`, or by an entry point.

It does not know suites or agents: `suite/loader.py` and `agent/loader.py` do.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from .core.errors import BadInput
from .core.records import Record

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

LONGEST_REASON = 500  # characters of the message of a user exception


class PluginEntry(Record, frozen=True):
    """A named plugin, as listed by `holdwater suites` and `holdwater agents`."""

    name: str
    description: str = ""
    source: str = ""  # the distribution that provides it; empty: holdwater itself


def find_object(spec: str) -> object:
    """Return the object of `path.py:name` or `module:name`; raise BadInput with the problem."""
    left, _, name = spec.rpartition(":")
    if not left or not name:
        raise BadInput(f"no name given: `{spec}`", hint="write `path.py:name` or `module:name`")
    module = find_module(left)
    try:
        return getattr(module, name)
    except AttributeError:
        near = find_close_name(name, vars(module))
        raise BadInput(f"`{left}` has no `{name}`", hint=f"did you mean `{near}`?" if near else "") from None


def find_module(name: str) -> ModuleType:
    """Return the module of a name, or of the path of a file or a package; raise BadInput with the problem."""
    path = Path(name)
    if name.endswith(".py"):
        return _load_file(path)
    if not path.is_dir() or "/" not in name:
        return _load_module(name)
    inner = path.resolve() / path.resolve().name.replace("-", "_")
    package = inner if (inner / "__init__.py").is_file() else path.resolve()
    if not (package / "__init__.py").is_file():
        raise BadInput(f"not a package: `{name}`", "it has no `__init__.py`")
    with _first_on_path(package.parent):
        return call_guarded(lambda: importlib.import_module(package.name), f"`{name}`")


def make_absolute(spec: str) -> str:
    """Return an equivalent spec that does not depend on the current directory."""
    left, colon, name = spec.rpartition(":")
    if left.endswith(".py"):
        return f"{Path(left).absolute()}{colon}{name}"
    return str(Path(spec).absolute()) if spec.endswith(".jsonl") else spec


def load_entry(group: str, name: str) -> object | None:
    """Load the entry point `name` of `group`; return None if there is none."""
    from importlib.metadata import entry_points  # a slow import, for which few runs have a use

    for point in entry_points(group=group, name=name):
        found: object = call_guarded(point.load, f"the entry point `{name}` of `{_name_source(point)}`")
        return found
    return None


def list_entries(group: str) -> list[PluginEntry]:
    """Return the entry points of `group`, without importing any."""
    from importlib.metadata import entry_points

    points = sorted(entry_points(group=group), key=lambda p: p.name)
    return [
        PluginEntry(name=p.name, description=f"entry point `{p.value}`", source=_name_source(p))
        for p in points
    ]


def make_unknown_error(what: str, spec: str, known: Iterable[PluginEntry], also: str) -> BadInput:
    """Return the error for an unknown name, with the known names and the closest match."""
    names = [k.name for k in known]
    near = find_close_name(spec, names)
    listed = ", ".join(f"`{name}`" for name in names)
    hint = f"did you mean `{near}`?" if near else f"use one of these or {also}"
    return BadInput(f"unknown {what}: `{spec[:200]}`; known are {listed}", hint=hint)


def find_close_name(name: str, among: Iterable[str]) -> str | None:
    """Return the closest match for a misspelt name; None if there is none."""
    return next(iter(difflib.get_close_matches(name, list(among), n=1)), None)


def call_guarded(call: Callable[[], T], place: str) -> T:
    """Call user code; convert its exceptions to a BadInput that names the place and the line."""
    try:
        return call()
    except BadInput:
        raise
    except (Exception, SystemExit) as error:  # boundary: foreign code may raise anything  # noqa: BLE001
        raise BadInput(f"cannot load {place}: {_describe_error(error)}") from None


def _load_file(path: Path) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        raise BadInput(f"no such file: `{path}`")
    name = _module_name(path)
    if name in sys.modules:  # one module for each version of a loaded file
        return sys.modules[name]
    return call_guarded(lambda: _execute(path, name), f"`{path}`")


def _module_name(path: Path) -> str:
    """Return a name that is unique for the path and its version, so that a notebook sees an edited file."""
    stat = path.stat()
    key = f"{path.resolve()}\0{stat.st_mtime_ns}\0{stat.st_size}"
    return f"holdwater_file_{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _execute(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"not a Python file: `{path}`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up while it is executed
    try:
        with _first_on_path(path.parent):
            spec.loader.exec_module(module)
    except BaseException:  # boundary: given back, then raised again
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> ModuleType:
    if "/" in name:
        raise BadInput(f"not a Python file: `{name}`", hint="write `path.py:name` or `module:name`")

    def load() -> ModuleType:
        try:
            with _first_on_path(Path.cwd()):
                return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and f"{name}.".startswith(f"{error.name}."):
                raise BadInput(
                    f"no such module: `{name}`", hint="is it installed, or in this directory?"
                ) from None
            raise

    return call_guarded(load, f"the module `{name}`")


@contextmanager
def _first_on_path(directory: Path) -> Iterator[None]:
    added = str(directory)
    sys.path.insert(0, added)
    try:
        yield
    finally:
        if added in sys.path:
            sys.path.remove(added)


def _describe_error(error: BaseException) -> str:
    """Return `file:line: exception`, for the deepest line outside of Python's and our own code."""
    what = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith((*_NOT_THEIRS, "<frozen"))]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}: {what}" if theirs else what


def _name_source(point: EntryPoint) -> str:
    return point.dist.name if point.dist else ""


_NOT_THEIRS = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parent))
