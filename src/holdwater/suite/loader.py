"""Finds a suite by its spec: a name, a file, a directory, `path.py:name` or `module:name`.

A worker loads the same spec again, so only the spec crosses a process boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .. import evaluation, plugin
from ..core.authoring import Suite
from ..core.errors import BadInput
from ..plugin import PluginEntry
from . import demo, swebench, verifiers
from .jsonl import jsonl
from .openhands import openhands

__all__ = ["PluginEntry", "check_suite", "list_suites", "load", "make_absolute"]

ENTRY_POINT_GROUP = "holdwater.suites"
HARBOR = "harbor:"
OTHER_SUITES = (
    "`path.py:name`, `module:name`, `file.jsonl`, `swebench:FILE`, `swt:FILE`, `vf:MODULE`,"
    " `openhands:module:Class` or a directory of Harbor tasks"
)

FUNCTIONS = (
    *("instances", "grade", "setup", "check", "check_agent", "image", "patch", "step", "solve", "group"),
    "needs",
)
BUILT_IN: dict[str, Callable[[], Suite]] = {"demo": demo.suite}


def load(spec: str) -> Suite:
    """Return the suite that `spec` names; raise BadInput if there is none or it is invalid."""
    if spec.startswith(evaluation.PREFIX):
        return openhands(spec)
    if _is_swebench(spec):
        return swebench.swebench(spec)
    if spec.startswith(verifiers.PREFIX):
        return verifiers.load_taskset(spec)
    if spec.endswith(".jsonl"):
        return jsonl(Path(spec))
    if spec in BUILT_IN:
        return BUILT_IN[spec]()
    if _is_tree(spec):
        from .harbor import harbor  # its records take time, and few workers need them

        return harbor(Path(spec.removeprefix(HARBOR)))
    if ":" in spec:
        return _as_suite(plugin.find_object(spec), spec)
    if spec.endswith(".py"):
        raise BadInput(f"missing suite name: `{spec}`", hint=f"name it: `{spec}:suite`")
    found = plugin.load_entry(ENTRY_POINT_GROUP, spec)
    if found is None:
        raise plugin.make_unknown_error("suite", spec, list_suites(), OTHER_SUITES)
    return _as_suite(found, spec)


def make_absolute(spec: str) -> str:
    """Return the spec with absolute paths, so that it is valid from any directory."""
    if spec.startswith(evaluation.PREFIX):
        return evaluation.make_absolute(spec)
    if _is_swebench(spec):
        return swebench.make_absolute(spec)
    if spec.startswith(verifiers.PREFIX):
        return verifiers.make_absolute(spec)
    if spec in BUILT_IN or not _is_tree(spec):
        return plugin.make_absolute(spec)
    path = Path(spec.removeprefix(HARBOR)).absolute()
    return f"{HARBOR}{path}"


def list_suites() -> list[PluginEntry]:
    """List the suites that `load` finds by name: built-in suites first, then installed plugins."""
    ours = [PluginEntry(name=name, description=make().description) for name, make in BUILT_IN.items()]
    return ours + [
        brought for brought in plugin.list_entries(ENTRY_POINT_GROUP) if brought.name not in BUILT_IN
    ]


def check_suite(suite: Suite, place: str) -> Suite:
    """Return `suite` if it can be run; raise BadInput for mistakes that would otherwise appear in mid-run."""
    if not isinstance(suite.name, str) or not suite.name:
        raise BadInput(f"`{place}`: `name` must be a non-empty string")
    for field in FUNCTIONS:
        value = getattr(suite, field)
        if not callable(value) and (value is not None or field == "instances"):
            hint = f"give the function itself, without calling it: `{field}={field}`"
            raise BadInput(f"`{place}`: `{field}` must be a function, not {type(value).__name__}", hint=hint)
    return suite


def _is_swebench(spec: str) -> bool:
    """Detect SWE-bench by the prefix or the file: Parquet, or JSON Lines whose first row has its fields."""
    kind, colon, _ = spec.partition(":")
    if colon and kind in swebench.KINDS:
        return True
    path = Path(spec.partition("?")[0])
    return path.suffix == ".parquet" or (path.suffix == ".jsonl" and swebench.recognised(path))


def _is_tree(spec: str) -> bool:
    """Return whether `spec` is a directory of tasks; the name of an installed suite takes precedence."""
    if spec.startswith(HARBOR):
        return True
    return Path(spec).is_dir() and (
        "/" in spec or spec not in {e.name for e in plugin.list_entries(ENTRY_POINT_GROUP)}
    )


def _as_suite(found: object, spec: str) -> Suite:
    """Return `found` itself or, if it is a factory, the suite that it returns."""
    if not isinstance(found, Suite) and callable(found):
        found = plugin.call_guarded(found, f"`{spec}`")
    if not isinstance(found, Suite):
        raise BadInput(
            f"not a suite: `{spec}` is {'None' if found is None else f'of type `{type(found).__name__}`'}",
            hint="it must be a `holdwater.Suite`, or return one",
        )
    return check_suite(found, spec)
