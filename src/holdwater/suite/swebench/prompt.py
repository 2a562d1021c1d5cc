"""Renders the agent's instruction from a row, with our Jinja2 template or the user's own."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import msgspec

from ...core.errors import BadInput
from . import reference
from .options import BenchmarkKind, SwebenchOptions
from .rows import SwebenchRow

TEMPLATES = Path(__file__).parent / "templates"
HIDDEN_FIELDS = (
    "patch",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
    "eval_script",
)  # fields that reveal the solution


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
