"""Render the Dockerfiles of the two build phases. Pure. Values with any characters arrive unchanged.

`image_build.py` builds them; `registry/manifest.py` applies the same recipe in a registry.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import msgspec

from ...core.image import ConfigEdits
from ...core.records import Record

ARGUMENT_PREFIX = "HOLDWATER_"


class RenderedDockerfile(Record, frozen=True):
    """The text of a Dockerfile, and the build arguments that it needs."""

    text: str
    arguments: dict[str, str] = msgspec.field(default_factory=dict)


def render_base(source: str, steps: Sequence[str]) -> RenderedDockerfile:
    """Return the Dockerfile of the base phase: the recipe's `before` lines on the base, without the agent."""
    return RenderedDockerfile(text=_join_lines([f"FROM {source}", *steps]))


def render_assembly(
    source: str, layers: Iterable[str], edits: ConfigEdits, labels: dict[str, str], after: Sequence[str]
) -> RenderedDockerfile:
    """Return the assembly's Dockerfile: layers from the context, configuration, the `after` lines."""
    words = _ValueQuoter()
    lines = [f'ADD ["{name}", "/"]' for name in layers]
    lines += [f"ENV {words.quote_key(name)}={words.quote_value(value)}" for name, value in edits.env.items()]
    lines += [f"LABEL {words.quote_key(name)}={words.quote_value(value)}" for name, value in labels.items()]
    lines += [f"WORKDIR {words.quote_value(edits.workdir)}"] if edits.workdir else []
    # An argument vector is JSON, which docker does not expand. ENTRYPOINT comes first because it resets CMD.
    lines += [f"ENTRYPOINT {json.dumps(edits.entrypoint)}"] if edits.entrypoint is not None else []
    lines += [f"CMD {json.dumps(edits.cmd)}"] if edits.cmd is not None else []
    lines += after  # as the base's user
    lines += [f"USER {words.quote_value(edits.user)}"] if edits.user else []
    declared = [f"ARG {name}" for name in words.arguments]
    return RenderedDockerfile(
        text=_join_lines([f"FROM {source}", *declared, *lines]), arguments=words.arguments
    )


class _ValueQuoter:
    """Quotes values; a value with a line break, which quotes cannot hold, becomes a build argument."""

    def __init__(self) -> None:
        self.arguments: dict[str, str] = {}  # bound: the recipe's values

    def quote_key(self, name: str) -> str:
        """Return a quoted key; docker splits at the first `=` before it reads quotes."""
        return self._pass_argument(name) if "=" in name else self.quote_value(name)

    def quote_value(self, value: str) -> str:
        if "\n" in value or "\r" in value:
            return self._pass_argument(value)
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
        return f'"{escaped}"'

    def _pass_argument(self, value: str) -> str:
        name = f"{ARGUMENT_PREFIX}{len(self.arguments)}"
        self.arguments[name] = value
        return f'"${{{name}}}"'


def _join_lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
