"""What the agent is asked: a Jinja2 template over the row, ours or the user's own."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import msgspec

from ...core.errors import BadInput
from . import reference
from .options import Kind, Options
from .rows import Row

TEMPLATES = Path(__file__).parent / "templates"
HIDDEN = ("patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS", "eval_script")  # what would give it away


class Prompt:
    """Fills the template; a mistake in it is a BadInput that names its file and line."""

    def __init__(self, options: Options) -> None:
        self._workdir = "." if options.copied else options.workdir
        ours = TEMPLATES / ("swt.j2" if options.kind is Kind.SWT else "swebench.j2")
        self._path = Path(options.template) if options.template else ours
        self._template = self._compiled()

    def fill(self, row: Row) -> str:
        values = {name: v for name, v in msgspec.structs.asdict(row).items() if name not in HIDDEN}
        values |= {"problem_statement": row.problem_statement or "", "hints_text": row.hints_text or ""}
        try:
            text: str = self._template.render(**values, images=row.images, workdir=self._workdir)
        except Exception as error:  # boundary: a template raises what it likes  # noqa: BLE001
            raise BadInput(f"{self._line(error)}: {error}") from None
        return text

    def _compiled(self) -> Any:
        reference.needed("jinja2")
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

    def _line(self, error: Exception) -> str:
        """The deepest line of the template that the error went through."""
        numbers = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(self._path)
        ]
        return f"{self._path.name}:{numbers[-1]}" if numbers else self._path.name
