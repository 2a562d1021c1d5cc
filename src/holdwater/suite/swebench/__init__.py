"""SWE-bench and SWT-bench: instances from rows of a file, patches from diffs, grades from the reference.

`rows.py` reads the rows, `patches.py` takes the patch, and `grading.py` grades with `reference.py`. This
process never imports the `swebench` package: see `judge.py`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ...core.authoring import Suite, SuiteDefaults
from ...core.errors import BadInput
from ...core.records import Instance, LimitOverrides, SandboxSpec
from ..jsonl import is_inside
from . import reference
from .grading import PatchGrader
from .patches import as_command, record_base, take_patch
from .rows import KINDS as KINDS
from .rows import BenchmarkKind, SwebenchOptions, SwebenchRow, check_rows, parse_options
from .rows import make_absolute as make_absolute
from .rows import read_rows as read
from .rows import recognised as recognised

SETUP_SECONDS = 900.0  # covers a container image of several gigabytes and a scan of the whole repository
BESIDE_TESTS = 600.0  # seconds of grading besides the tests: a new container, patches, the log parser
TEMPLATES = Path(__file__).parent / "templates"
# Fields that reveal the solution.
HIDDEN_FIELDS = ("patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS", "eval_script")


def swebench(spec: str) -> Suite:
    """Return the suite for the spec `swebench:FILE?...` or `swt:FILE?...`."""
    options = parse_options(spec)
    source = options.source
    if isinstance(source, Path) and not source.is_file():
        raise BadInput(f"no such file: `{source}`")
    name = source.stem if isinstance(source, Path) else source.name.rpartition("/")[2]
    grading = PatchGrader(options)

    def instances() -> Iterator[Instance]:
        prompt = PromptTemplate(options)
        return (_instance(row, options, prompt) for _, row in read(source))

    def check() -> None:
        reference.check()
        PromptTemplate(options)
        count = check_rows(source, lambda row: _check(row, options, reference.parsers()))
        msgspec.structs.force_setattr(suite, "size", count)

    suite = Suite(
        name=name,
        instances=instances,
        grade=grading.grade,
        setup=record_base,
        patch=take_patch,
        fresh=False,  # each grading starts a new sandbox and applies the patch
        check=check,
        defaults=SuiteDefaults(sandbox="process" if options.copied else "docker"),
        description=f"the {options.kind.display_name} rows of `{name}`",
    )
    return suite


def _check(row: SwebenchRow, options: SwebenchOptions, parsers: frozenset[str]) -> None:
    """Raise a ValueError if a row is invalid."""
    if options.repos and not is_inside(row.instance_id):
        raise ValueError(f"field `instance_id`: not a directory name: {row.instance_id[:200]!r}")
    if options.repos and not _directory(row, options).is_dir():
        raise ValueError(f"field `instance_id`: no such directory: `{_directory(row, options)}`")
    row.check(parsers)


def _instance(row: SwebenchRow, options: SwebenchOptions, prompt: PromptTemplate) -> Instance:
    gold = row.test_patch if options.kind is BenchmarkKind.SWT else row.patch
    timeouts = 2 if options.kind is BenchmarkKind.SWT else 1
    return Instance(
        id=row.instance_id,
        instruction=prompt.fill(row),
        directory=str(_directory(row, options)) if options.repos else None,
        solution=as_command(gold) if gold else None,
        data={**row.to_grading_data(), "gold_patch": gold or ""},
        limits=LimitOverrides(setup=SETUP_SECONDS, grading=options.timeout * timeouts + BESIDE_TESTS),
        start=_start(row, options),
    )


def _start(row: SwebenchRow, options: SwebenchOptions) -> SandboxSpec:
    if options.copied:
        return SandboxSpec()
    image = options.image or row.image or "{namespace}/sweb.eval.x86_64.{id}:latest"
    name = row.instance_id.lower().replace("__", "_1776_")
    return SandboxSpec(
        image=image.replace("{namespace}", options.namespace).replace("{id}", name),
        workdir=options.workdir,
        processes=False,
    )


def _directory(row: SwebenchRow, options: SwebenchOptions) -> Path:
    return Path(options.repos or "") / row.instance_id


class PromptTemplate:
    """Fills the template; an error in it raises BadInput with its file and line."""

    def __init__(self, options: SwebenchOptions) -> None:
        self._workdir = "." if options.copied else options.workdir
        ours = TEMPLATES / ("swt.j2" if options.kind is BenchmarkKind.SWT else "swebench.j2")
        self._path = Path(options.template) if options.template else ours
        self._template = self._compile_template()

    def fill(self, row: SwebenchRow) -> str:
        values = {name: v for name, v in msgspec.structs.asdict(row).items() if name not in HIDDEN_FIELDS}
        values |= {"problem_statement": row.problem_statement or "", "hints_text": row.hints_text or ""}
        try:
            text: str = self._template.render(**values, images=row.images, workdir=self._workdir)
        except Exception as error:  # boundary: a template can raise anything  # noqa: BLE001
            raise BadInput(f"{self._find_line(error)}: {error}") from None
        return text

    def _compile_template(self) -> Any:
        reference.import_extra("jinja2")
        from jinja2 import StrictUndefined, TemplateSyntaxError
        from jinja2.sandbox import SandboxedEnvironment

        environment = SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        try:
            source = self._path.read_text(encoding="utf-8")
            code = environment.compile(source, filename=str(self._path))
        except TemplateSyntaxError as error:
            raise BadInput(f"{self._path.name}:{error.lineno}: {error.message}") from None
        except UnicodeDecodeError:
            raise BadInput(f"not valid UTF-8: `{self._path}`") from None
        except OSError as error:
            raise BadInput(f"cannot read `{self._path}`: {error.strerror}") from None
        return environment.template_class.from_code(environment, code, environment.make_globals(None))

    def _find_line(self, error: Exception) -> str:
        """Return the deepest line of the template in the error's traceback."""
        numbers = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(self._path)
        ]
        return f"{self._path.name}:{numbers[-1]}" if numbers else self._path.name
