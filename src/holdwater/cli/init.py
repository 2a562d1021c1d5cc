"""`holdwater init`: writes an example suite or agent, and its test. The texts are in `templates/`."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template
from typing import Literal

from cyclopts import App

from ..core.errors import BadInput, HoldwaterError
from .console import CommandConsole
from .flags import Flag

TEMPLATES = Path(__file__).parent / "templates"
LONGEST_NAME = 64
Kind = Literal["suite", "agent"]

init = App(
    name="init",
    help="""Write a small working example as a starting point, and a test for it that passes.

    For example: `holdwater init suite puzzles`, or `holdwater init agent solver --dir agents`.""",
    help_format="markdown",
    version_flags=(),
)


@init.command
def suite(name: str, /, *, dir: Path | None = None, json: Flag = False) -> int:
    """Write a suite of three instances, with solutions and a grade, and its test.

    For example: `holdwater init suite puzzles`

    Parameters
    ----------
    name
        The name: letters, digits, `-` and `_`.
    dir
        The directory for its files (default: a directory with its name).
    json
        Print one JSON document.
    """
    spec = f"{module_of(name)}.py:suite"
    next_ = (f"holdwater check {spec}", f"holdwater run {spec} --agent bash --model MODEL")
    return write_example("suite", name, dir, next_, json=json)


@init.command
def agent(name: str, /, *, dir: Path | None = None, json: Flag = False) -> int:
    """Write an agent in Python that drives its sandbox, and its test.

    For example: `holdwater init agent solver --dir agents`

    Parameters
    ----------
    name
        The name: letters, digits, `-` and `_`.
    dir
        The directory for its files (default: a directory with its name).
    json
        Print one JSON document.
    """
    next_ = (f"holdwater run demo --agent {module_of(name)}.py:solve --model MODEL",)
    return write_example("agent", name, dir, next_, json=json)


def write_example(kind: Kind, name: str, dir: Path | None, next_: tuple[str, ...], *, json: bool) -> int:
    """Write the files, and print the next steps."""
    place = Path(name) if dir is None else dir
    files = write_files(kind, name, place)
    steps = (f"cd {place}", f"pytest test_{module_of(name)}.py", *next_)
    if json:
        CommandConsole().write_json({"directory": place, "files": files, "next": steps})
    else:
        written = "\n".join(f"wrote {file}" for file in files)
        CommandConsole().write_page(f"{written}\n\nnext:\n" + "\n".join(f"  {step}" for step in steps))
    return 0


def write_files(kind: Kind, name: str, place: Path) -> list[Path]:
    """Write the files of a new suite or agent; raise BadInput if one of them exists."""
    module = module_of(name)
    texts = {
        place / f"{module}.py": f"{kind}.py.txt",
        place / f"test_{module}.py": f"test_{kind}.py.txt",
        place / f"{module}.md": f"{kind}.md.txt",
    }
    there = [path for path in texts if path.exists()]
    if there:
        raise BadInput(f"`{there[0]}` already exists", "choose another name, or another `--dir`")
    try:
        place.mkdir(parents=True, exist_ok=True)
        for path, template in texts.items():
            text = Template((TEMPLATES / template).read_text("utf-8")).substitute(name=name, module=module)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise HoldwaterError(f"cannot write to `{place}`: {error.strerror}") from None
    return list(texts)


def module_of(name: str) -> str:
    """Return the name as a Python module name; raise BadInput if it is not valid."""
    module = name.replace("-", "_")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", module) or len(name) > LONGEST_NAME:
        raise BadInput(
            f"invalid name: `{name[:200]}`", f"letters, digits, `-` and `_`, at most {LONGEST_NAME}"
        )
    if keyword.iskeyword(module) or module in ("holdwater", "pytest", "test"):
        raise BadInput(f"reserved name: `{name}`", "choose another")
    return module
