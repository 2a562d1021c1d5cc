"""Parses a spec: `swebench:rows.jsonl?template=prompt.j2&timeout=3600`. Workers receive only the spec."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, urlencode

import msgspec
from msgspec import Meta

from ...core.errors import BadInput
from ...core.input_checks import explain_path
from ...core.records import Network, Record


class BenchmarkKind(StrEnum):
    SWEBENCH = "swebench"  # the agent fixes the code
    SWT = "swt"  # the agent writes tests that reproduce the bug

    @property
    def display_name(self) -> str:
        return "SWT-bench" if self is BenchmarkKind.SWT else "SWE-bench"


KINDS = tuple(BenchmarkKind)
PATH_OPTIONS = ("template", "repos", "assets")  # options that are paths on this machine


class SwebenchOptions(Record, frozen=True):
    path: str
    kind: BenchmarkKind = BenchmarkKind.SWEBENCH
    template: str | None = None  # path of a Jinja2 template for the instruction
    namespace: str = "swebench"  # registry namespace of the images
    image: str | None = None  # used for every row; `{id}` stands for the instance's id
    workdir: str = "/testbed"
    repos: str | None = None  # a directory with one git repository per instance, named by its id
    assets: str | None = None  # a directory `<instance>/<path>` with the binary files of test patches
    timeout: Annotated[float, Meta(gt=0)] = 1800.0  # seconds for the tests
    network: Network | None = None  # the network of grading; by default the agent's

    @property
    def copied(self) -> bool:
        """Whether repositories are copied into the working directory of any kind of sandbox."""
        return self.repos is not None and not self.image


def parse_options(spec: str) -> SwebenchOptions:
    """Parse the options of a spec; raise BadInput that names the invalid one."""
    kind, path, given = _split_spec(spec)
    try:
        options = msgspec.convert({"path": path, "kind": kind, **given}, SwebenchOptions, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(f"`{name}`" for name in SwebenchOptions.__struct_fields__[2:])
        what, _, name = str(error).partition(" - at `$.")
        what = what.replace("Object contains unknown field", "unknown option:")
        text = f"`{name[:-1]}`: {what[0].lower()}{what[1:]}" if name else what
        raise BadInput(f"invalid option in `{spec[:200]}`: {text}", hint=f"known options: {known}") from None
    if problem := explain_path(options.workdir):
        raise BadInput(f"invalid option in `{spec[:200]}`: `workdir` {problem}")
    return options


def make_absolute(spec: str) -> str:
    """Return the spec with absolute paths, so that it is valid from any directory."""
    kind, path, given = _split_spec(spec)
    given = {name: str(Path(v).absolute()) if name in PATH_OPTIONS else v for name, v in given.items()}
    return f"{kind}:{Path(path).absolute()}" + (f"?{urlencode(given, safe='/{}:')}" if given else "")


def _split_spec(spec: str) -> tuple[str, str, dict[str, str]]:
    kind, colon, rest = spec.partition(":")
    if not colon or kind not in KINDS:
        kind, rest = BenchmarkKind.SWEBENCH, spec
    path, _, query = rest.partition("?")
    try:
        return kind, path, dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise BadInput(
            f"invalid options: `?{query[:200]}`", hint="options look like `?template=prompt.j2&timeout=3600`"
        ) from None
