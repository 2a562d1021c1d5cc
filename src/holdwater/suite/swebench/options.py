"""What a spec says: `swebench:rows.jsonl?template=prompt.j2&timeout=3600`. A spec is all that workers get."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, urlencode

import msgspec
from msgspec import Meta

from ...core.errors import BadInput
from ...core.records import Network, Record
from ...core.start_paths import explain_path


class Kind(StrEnum):
    SWEBENCH = "swebench"  # the agent mends the code
    SWT = "swt"  # the agent writes tests that show the fault

    @property
    def told(self) -> str:
        return "SWT-bench" if self is Kind.SWT else "SWE-bench"


KINDS = tuple(Kind)
PATHS = ("template", "repos", "assets")  # options that name files of this machine
SUFFIX = ".parquet"  # a file of this kind needs no prefix


class Options(Record, frozen=True):
    path: str
    kind: Kind = Kind.SWEBENCH
    template: str | None = None  # a Jinja2 file for the instruction
    namespace: str = "swebench"  # whose images
    image: str | None = None  # for every row, with `{id}` for the instance's
    workdir: str = "/testbed"
    repos: str | None = None  # a directory with a git repository for each instance, by its id
    assets: str | None = None  # a directory `<instance>/<path>` with the binary files of test patches
    timeout: Annotated[float, Meta(gt=0)] = 1800.0  # seconds for the tests
    network: Network | None = None  # what grading reaches; as the agent did otherwise

    @property
    def copied(self) -> bool:
        """Whether repositories are copied into the working directory of whatever sandbox there is."""
        return self.repos is not None and not self.image


def parse(spec: str) -> Options:
    """The options in a spec; BadInput names the wrong one."""
    kind, path, given = _split(spec)
    try:
        options = msgspec.convert({"path": path, "kind": kind, **given}, Options, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(f"`{name}`" for name in Options.__struct_fields__[2:])
        raise BadInput(f"wrong option in `{spec[:200]}`: {error}", hint=f"known are {known}") from None
    if problem := explain_path(options.workdir):
        raise BadInput(f"wrong option in `{spec[:200]}`: `workdir` {problem}")
    return options


def absolute(spec: str) -> str:
    """The same spec, meaning the same from any directory."""
    kind, path, given = _split(spec)
    given = {name: str(Path(v).absolute()) if name in PATHS else v for name, v in given.items()}
    return f"{kind}:{Path(path).absolute()}" + (f"?{urlencode(given, safe='/{}:')}" if given else "")


def _split(spec: str) -> tuple[str, str, dict[str, str]]:
    kind, colon, rest = spec.partition(":")
    if not colon or kind not in KINDS:
        kind, rest = Kind.SWEBENCH, spec
    path, _, query = rest.partition("?")
    try:
        return kind, path, dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise BadInput(
            f"not read: `?{query[:200]}`", hint="options look like `?template=prompt.j2&timeout=3600`"
        ) from None
