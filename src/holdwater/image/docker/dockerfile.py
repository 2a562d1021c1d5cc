"""The Dockerfiles of the two phases. Pure. Values come out as they went in, whatever is in them.

Who builds them is in `making.py`; what a registry is given for the same recipe in `registry/manifest.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import msgspec

from ...core.image import Edits
from ...core.records import Record

ARGUMENT = "HOLDWATER_"


class Dockerfile(Record, frozen=True):
    """Its text, and the build arguments that it takes."""

    text: str
    arguments: dict[str, str] = msgspec.field(default_factory=dict)


def base_phase(source: str, steps: Sequence[str]) -> Dockerfile:
    """The recipe's own lines on the base, before the agent is there."""
    return Dockerfile(text=_joined([f"FROM {source}", *steps]))


def assembly(
    source: str, layers: Iterable[str], edits: Edits, labels: dict[str, str], after: Sequence[str]
) -> Dockerfile:
    """The layers' files from the context, the configuration, and the recipe's lines that come after."""
    words = _Words()
    lines = [f'ADD ["{name}", "/"]' for name in layers]
    lines += [f"ENV {words.key(name)}={words.said(value)}" for name, value in edits.env.items()]
    lines += [f"LABEL {words.key(name)}={words.said(value)}" for name, value in labels.items()]
    lines += [f"WORKDIR {words.said(edits.workdir)}"] if edits.workdir else []
    # An argument vector is JSON, in which nothing is expanded. The entrypoint is first: it takes CMD away.
    lines += [f"ENTRYPOINT {json.dumps(edits.entrypoint)}"] if edits.entrypoint is not None else []
    lines += [f"CMD {json.dumps(edits.cmd)}"] if edits.cmd is not None else []
    lines += after  # as the base's user
    lines += [f"USER {words.said(edits.user)}"] if edits.user else []
    declared = [f"ARG {name}" for name in words.arguments]
    return Dockerfile(text=_joined([f"FROM {source}", *declared, *lines]), arguments=words.arguments)


class _Words:
    """Quotes values; one with a line break, which no quotes can hold, becomes a build argument."""

    def __init__(self) -> None:
        self.arguments: dict[str, str] = {}  # bound: the recipe's values

    def key(self, name: str) -> str:
        """What stands before the `=`, which is looked for before quotes are."""
        return self._passed(name) if "=" in name else self.said(name)

    def said(self, value: str) -> str:
        if "\n" in value or "\r" in value:
            return self._passed(value)
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
        return f'"{escaped}"'

    def _passed(self, value: str) -> str:
        name = f"{ARGUMENT}{len(self.arguments)}"
        self.arguments[name] = value
        return f'"${{{name}}}"'


def _joined(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
