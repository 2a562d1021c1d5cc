"""Finds a suite by what the user typed: a name, a file, a directory, `path.py:name` or `module:name`.

A worker loads the same spec again, so a spec is all that crosses a process boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .. import plugin
from ..core.authoring import Suite
from ..core.errors import BadInput
from ..plugin import Known
from . import demo, swebench
from .harbor import harbor
from .jsonl import jsonl

__all__ = ["Known", "absolute", "checked", "known", "load"]

GROUP = "holdwater.suites"
HARBOR = "harbor:"
OTHERS = (
    "`path.py:name`, `module:name`, `file.jsonl`, `swebench:FILE`, `swt:FILE` or a directory of Harbor tasks"
)

BUILT_IN: dict[str, Callable[[], Suite]] = {"demo": demo.suite}


def load(spec: str) -> Suite:
    """The suite that `spec` stands for; BadInput says what is wrong with it."""
    if _of_swebench(spec):
        return swebench.swebench(spec)
    if spec.endswith(".jsonl"):
        return jsonl(Path(spec))
    if spec in BUILT_IN:
        return BUILT_IN[spec]()
    if _is_tree(spec):
        return harbor(Path(spec.removeprefix(HARBOR)))
    if ":" in spec:
        return _made(plugin.find(spec), spec)
    if spec.endswith(".py"):
        raise BadInput(f"which suite in `{spec}`?", hint=f"name it: `{spec}:suite`")
    found = plugin.entry(GROUP, spec)
    if found is None:
        raise plugin.unknown("suite", spec, known(), OTHERS)
    return _made(found, spec)


def absolute(spec: str) -> str:
    """The same spec, meaning the same from any directory."""
    if _of_swebench(spec):
        return swebench.absolute(spec)
    if spec in BUILT_IN or not _is_tree(spec):
        return plugin.absolute(spec)
    path = Path(spec.removeprefix(HARBOR)).absolute()
    return f"{HARBOR}{path}"


def known() -> list[Known]:
    """What `load` knows by name: ours, then what installed distributions bring."""
    ours = [Known(name=name, description=make().description) for name, make in BUILT_IN.items()]
    return ours + [brought for brought in plugin.entries(GROUP) if brought.name not in BUILT_IN]


def checked(suite: Suite, place: str) -> Suite:
    """`suite`, if it can be run: the mistakes that would otherwise show up in the middle of a run."""
    if not isinstance(suite.name, str) or not suite.name:
        raise BadInput(f"`{place}`: `name` must be a text that is not empty")
    for field in (
        "instances",
        "grade",
        "setup",
        "check",
        "image",
        "patch",
        "step",
        "solve",
        "group",
        "needs",
    ):
        value = getattr(suite, field)
        if not callable(value) and (value is not None or field == "instances"):
            hint = f"give the function itself, without calling it: `{field}={field}`"
            raise BadInput(f"`{place}`: `{field}` must be a function, not {type(value).__name__}", hint=hint)
    return suite


def _of_swebench(spec: str) -> bool:
    """By its prefix, or by its file: Parquet, or JSON Lines of which the first row is one of SWE-bench's."""
    kind, colon, _ = spec.partition(":")
    if colon and kind in swebench.KINDS:
        return True
    path = Path(spec.partition("?")[0])
    return path.suffix == ".parquet" or (path.suffix == ".jsonl" and swebench.recognised(path))


def _is_tree(spec: str) -> bool:
    """Whether it is a directory of tasks; a name that is installed stays that name."""
    if spec.startswith(HARBOR):
        return True
    return Path(spec).is_dir() and ("/" in spec or spec not in {e.name for e in plugin.entries(GROUP)})


def _made(found: object, spec: str) -> Suite:
    """`found` itself, or what it returns: a factory may build the suite late."""
    if not isinstance(found, Suite) and callable(found):
        found = plugin.guarded(found, f"`{spec}`")
    if not isinstance(found, Suite):
        raise BadInput(
            f"not a suite: `{spec}` is {_kind(found)}", hint="it must be a `holdwater.Suite`, or return one"
        )
    return checked(found, spec)


def _kind(found: object) -> str:
    return "None" if found is None else f"of type `{type(found).__name__}`"
