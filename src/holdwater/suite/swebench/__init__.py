"""SWE-bench and its kin: rows of a file as instances, the agent's diff as the patch, the reference's verdict.

`rows.py` reads, `prompt.py` asks, `work.py` takes the patch, `grading.py` grades with `reference.py`. The
`swebench` package is never imported here: see `judge.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...core.authoring import Defaults, Suite
from ...core.errors import BadInput
from ...core.records import Ask, Instance, Start
from . import reference
from .grading import Grading
from .options import KINDS as KINDS
from .options import Kind, Options, parse
from .options import absolute as absolute
from .patches import as_command
from .prompt import Prompt
from .rows import Row, check_rows, inside
from .rows import recognised as recognised
from .rows import rows as read
from .work import remember, take

SETUP_SECONDS = 900.0  # a container of several gigabytes, and a look at every file of its repository
BESIDE_TESTS = 600.0  # seconds of grading beside the tests themselves: a new container, patches, the parser


def swebench(spec: str) -> Suite:
    """The suite that `swebench:FILE?...` or `swt:FILE?...` stands for."""
    options = parse(spec)
    path = Path(options.path)
    if not path.is_file():
        raise BadInput(f"no such file: `{path}`")
    grading = Grading(options)

    def instances() -> Iterator[Instance]:
        prompt = Prompt(options)
        return (_instance(row, options, prompt) for _, row in read(path))

    def check() -> None:
        reference.check()
        Prompt(options)
        count = check_rows(path, lambda row: _check(row, options, reference.parsers()))
        msgspec.structs.force_setattr(suite, "size", count)

    suite = Suite(
        name=path.stem,
        instances=instances,
        grade=grading.grade,
        setup=remember,
        patch=take,
        fresh=False,  # each grading begins anew and applies the patch
        check=check,
        defaults=Defaults(sandbox="process" if options.copied else "docker"),
        description=f"the {options.kind.told} rows of `{path.name}`",
    )
    return suite


def _check(row: Row, options: Options, parsers: frozenset[str]) -> None:
    """What is wrong with a row, as a ValueError."""
    if options.repos and not inside(row.instance_id):
        raise ValueError(f"field `instance_id`: no name of a directory: {row.instance_id[:200]!r}")
    if options.repos and not _directory(row, options).is_dir():
        raise ValueError(f"field `instance_id`: no such directory: `{_directory(row, options)}`")
    row.check(parsers)


def _instance(row: Row, options: Options, prompt: Prompt) -> Instance:
    gold = row.test_patch if options.kind is Kind.SWT else row.patch
    timeouts = 2 if options.kind is Kind.SWT else 1
    return Instance(
        id=row.instance_id,
        instruction=prompt.fill(row),
        directory=str(_directory(row, options)) if options.repos else None,
        solution=as_command(gold) if gold else None,
        data={**row.needed(), "gold_patch": gold or ""},
        limits=Ask(setup=SETUP_SECONDS, grading=options.timeout * timeouts + BESIDE_TESTS),
        start=_start(row, options),
    )


def _start(row: Row, options: Options) -> Start:
    if options.copied:
        return Start()
    image = options.image or row.image or "{namespace}/sweb.eval.x86_64.{id}:latest"
    name = row.instance_id.lower().replace("__", "_1776_")
    return Start(
        image=image.replace("{namespace}", options.namespace).replace("{id}", name),
        workdir=options.workdir,
        processes=False,
    )


def _directory(row: Row, options: Options) -> Path:
    return Path(options.repos or "") / row.instance_id
