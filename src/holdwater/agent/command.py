"""Agents that are programs: runs any command in the sandbox, with the model's URL and key.

The template is split into words first and filled in afterwards, so a value never becomes a shell word. The
files of this machine that a program needs to start are found without running anything; `rollout/host.py`
makes sandboxes show them.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import string
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import field

from ..core.authoring import Agent, Model, Sandbox
from ..core.errors import AGENT_MISSING, AgentFailed, BadInput, ModelFailed, RunFailed, SandboxFailed
from ..core.records import CommandResult, Instance, Record
from ..dialect import list_providers

MODEL_PLACEHOLDERS = ("model", "model_url", "model_key")
PLACEHOLDERS = ("id", "instruction", "instruction_file", "workdir", *MODEL_PLACEHOLDERS)
LONGEST_ARGUMENT = 128 * 1024 - 1  # bytes; the limit of Linux for one argument
LONGEST_REASON = 2000  # characters of output quoted in a failure
NOT_FOUND = 127  # exit status of a shell, or of a sandbox that uses one, for a missing program
SHELLS = ("sh", "bash", "dash", "zsh")  # their arguments may be a command line that names programs
MISSING = "missing"  # failure kind of a sandbox that checks for the program first

Part = tuple[str, str | None]  # literal text, and the placeholder that follows it
LONGEST_FIRST_LINE = 4096  # bytes of a script that are searched for its interpreter
MOST_LINKS = 40  # maximum number of links in one path, as in the kernel
# Shown of a prefix that may hold more than programs.
PREFIX_PARTS = ("bin", "lib", "lib64", "libexec", "pyvenv.cfg")


def command(template: str) -> Agent:
    """Return an agent that runs `template`; its answer is the program's standard output.

    The instruction is passed as `{instruction}` or else in a file (`{instruction_file}`,
    `HOLDWATER_INSTRUCTION_FILE`). The model is passed as `{model}`, `{model_url}` (which ends in `/v1`) and
    `{model_key}`, in `HOLDWATER_MODEL`, and in the variables of `_model_variables`.
    """
    words = _parse(template)
    program = words[0][0][0]
    used = {name for word in words for _, name in word}
    by_file = "instruction" not in used or "instruction_file" in used

    async def act(instance: Instance, sandbox: Sandbox, model: Model) -> str:
        if by_file:
            await sandbox.write(instruction_file(sandbox), instance.instruction)
        values = _values(instance, sandbox) | _model_values(model, not used.isdisjoint(MODEL_PLACEHOLDERS))
        filled = [program, *(_fill(word, values) for word in words[1:])]
        return (await run_program(program, filled, sandbox, _environment(values, by_file))).stdout

    def check() -> None:
        # A path may exist only in the sandbox, so only the first attempt can check it.
        if "/" not in program:
            check_program(program)

    return Agent(
        name=f"command:{program}",
        act=act,
        needs_model=not used.isdisjoint(MODEL_PLACEHOLDERS),
        check=check,
        description=f"runs `{template}`",
        paths=find_paths(program, *("".join(text for text, _ in word) for word in words[1:])),
        notes=tuple(_describe_relative(word[0][0]) for word in words[1:] if _is_relative_file(word)),
    )


def find_paths(program: str, *words: str) -> tuple[str, ...]:
    """Return the files of this machine that a command names: programs by name, files by absolute path."""
    named = [token for word in words for token in _tokens(word)] if Path(program).name in SHELLS else []
    found = [shutil.which(name) if "/" not in name else name for name in (program, *named)]
    files = [path for path in found if path and _exists(path) and not Path(path).is_dir()]
    paths = dict.fromkeys((*files, *filter(_exists, words)))
    return tuple(path for path in paths if path.startswith("/"))


def _is_relative_file(word: list[Part]) -> bool:
    """Return whether a word names a file in the current directory, which is not the sandbox's."""
    name = word[0][0]
    literal = all(placeholder is None for _, placeholder in word)
    return literal and not name.startswith("/") and _exists(name) and Path(name).is_file()


def _describe_relative(name: str) -> str:
    return (
        f"`{name}` in the agent's command refers to the sandbox's working directory; "
        f"the file here is `{Path(name).absolute()}`"
    )


def _tokens(line: str) -> list[str]:
    """Return the words of a shell command line, without operators and quotes."""
    try:
        return list(shlex.shlex(line, posix=True, punctuation_chars=True))
    except ValueError:
        return line.split()


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long, or contains NUL: not a valid path
        return False


async def run_program(
    program: str, words: list[str], sandbox: Sandbox, env: Mapping[str, str], install: str = ""
) -> CommandResult:
    """Run `words`, which start `program`; raise AgentFailed if the exit status is not 0.

    A missing program raises RunFailed, because it would fail every instance.
    """
    try:
        result = await sandbox.run(words, env=env)
    except SandboxFailed as error:
        if error.kind != MISSING:
            raise
        raise _missing_program(program, install) from None
    if result.exit_code == NOT_FOUND and not await _is_there(program, sandbox):
        raise _missing_program(program, install)
    if not result.ok:
        reason = (result.stderr.strip() or result.stdout.strip())[-LONGEST_REASON:]
        raise AgentFailed(f"`{program}` ended with status {result.exit_code}: {reason}", kind="exit")
    return result


def check_program(program: str, install: str = "") -> None:
    """Raise RunFailed if the program is not on PATH or its interpreter is missing."""
    found = shutil.which(program)
    if found is None:
        raise _missing_program(program, install)
    interpreter = find_interpreter(Path(found))
    if interpreter is not None and shutil.which(interpreter) is None:
        raise RunFailed(
            f"the interpreter of the agent's program `{program}` is missing: `{interpreter}`",
            hint=f"install it, or fix the first line of `{found}`",
            kind=AGENT_MISSING,
        )


def instruction_file(sandbox: Sandbox) -> str:
    """Return the path for the instruction, outside the working directory, where it would count as work."""
    return f"{sandbox.private}/instruction.md"


def check_argument(text: str, hint: str) -> str:
    """Return `text` if it is valid as an argument; raise AgentFailed otherwise."""
    if "\0" in text or len(text.encode()) > LONGEST_ARGUMENT:
        problem = "has a NUL character" if "\0" in text else f"is longer than {LONGEST_ARGUMENT} bytes"
        raise AgentFailed(f"an argument of the agent's command {problem}", hint=hint, kind="argument")
    return text


def _parse(template: str) -> list[list[Part]]:
    try:
        words = [_parse_word(word) for word in shlex.split(template)]
    except ValueError as error:
        raise BadInput(f"cannot read the agent's command: {error}: `{template}`") from None
    if not words or words[0] == [("", None)]:
        raise BadInput("the agent's command is empty", hint="for example: --command 'my-agent {instruction}'")
    if any(name is not None for _, name in words[0]):
        raise BadInput(f"the agent's program cannot be a placeholder: `{shlex.split(template)[0]}`")
    return words


def _parse_word(word: str) -> list[Part]:
    hint = "write `{{` and `}}` for literal braces; known placeholders: " + ", ".join(
        f"`{{{name}}}`" for name in PLACEHOLDERS
    )
    try:
        parsed = list(string.Formatter().parse(word))
    except ValueError:
        raise BadInput(f"unmatched brace in the agent's command: `{word}`", hint=hint) from None
    for _, name, form, conversion in parsed:
        if name is not None and (name not in PLACEHOLDERS or form or conversion):
            raise BadInput(f"unknown placeholder in the agent's command: `{word}`", hint=hint)
    parts = [(literal, name) for literal, name, _, _ in parsed]
    if all(name is None for _, name in parts):  # `Formatter.parse` splits such a word at escaped braces
        return [("".join(literal for literal, _ in parts), None)]
    return parts


def _values(instance: Instance, sandbox: Sandbox) -> dict[str, str]:
    return {
        "id": instance.id,
        "instruction": instance.instruction,
        "instruction_file": instruction_file(sandbox),
        "workdir": sandbox.workdir,
    }


def _model_values(model: Model, needed: bool) -> dict[str, str]:
    """Return the values of the model; empty if the run has no model and the template needs none."""
    try:
        return {"model": model.name, "model_url": model.sandbox_url, "model_key": model.key}
    except ModelFailed:
        if needed:
            raise
        return {}


def _fill(word: list[Part], values: Mapping[str, str]) -> str:
    filled = "".join(literal + (values[name] if name else "") for literal, name in word)
    return check_argument(filled, "use `{instruction_file}`")


def _environment(values: Mapping[str, str], by_file: bool) -> dict[str, str]:
    environment = {"HOLDWATER_ID": values["id"], "HOLDWATER_WORKDIR": values["workdir"]}
    if by_file:
        environment["HOLDWATER_INSTRUCTION_FILE"] = values["instruction_file"]
    if "model" in values:
        environment["HOLDWATER_MODEL"] = values["model"]
        environment |= _model_variables(values["model_url"], values["model_key"])
    return environment


def _model_variables(url: str, key: str) -> dict[str, str]:
    """Return the variables that the SDKs of all dialects read."""
    variables: dict[str, str] = {}
    for provider in list_providers():
        base = url if provider.versioned else url.removesuffix("/v1")
        variables |= dict.fromkeys((provider.url, *provider.other_urls), base)
        variables |= dict.fromkeys(provider.keys, key)
    return variables


async def _is_there(program: str, sandbox: Sandbox) -> bool:
    """Return whether the program exists; one that exists may also end with 127 if it misses another."""
    return (await sandbox.run(["sh", "-c", 'command -v "$1"', "sh", program])).ok


def _missing_program(program: str, install: str) -> RunFailed:
    hint = f"`{install}`" if install else "install it, or give its absolute path"
    if "/" in program and Path(program).is_file() and not Path(program).is_absolute():
        here = Path(program).absolute()
        hint = f"a relative path refers to the sandbox's working directory: use `{here}` for the local file"
    return RunFailed(f"the agent's program is missing: `{program}`", hint=hint, kind=AGENT_MISSING)


class ProgramFiles(Record, frozen=True):
    """Paths of this machine; a sandbox shows each at the same path."""

    trees: frozenset[str] = frozenset()  # files and directories whose paths contain no links
    links: dict[str, str] = field(default_factory=dict)  # path -> target

    def join(self, other: ProgramFiles) -> ProgramFiles:
        return ProgramFiles(trees=self.trees | other.trees, links=self.links | other.links)


def find_program_files(paths: Iterable[str], search: str) -> ProgramFiles:
    """Return the files that these programs need; `search` is the PATH for interpreters."""
    found, seen, waiting = ProgramFiles(), set[str](), list(paths)
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        links, real = trace_links(path)
        if Path(real).is_dir():
            continue  # a directory may hold anything; users show it with `--mount`
        places = [Path(os.path.realpath(Path(place).parent), Path(place).name) for place in (*links, real)]
        trees = {tree for place in places for tree in _find_package(place)}
        found = found.join(ProgramFiles(trees=frozenset({real, *trees}), links=links))
        interpreter = find_interpreter(Path(real))
        at = shutil.which(interpreter, path=search) if interpreter else None
        if at is not None:
            waiting.append(str(Path(at).absolute()))
    return found


def trace_links(path: str) -> tuple[dict[str, str], str]:
    """Return every link on the way to `path` with its target, and the path without links."""
    links: dict[str, str] = {}
    real, todo = "", path.split("/")[::-1]
    while todo:
        step = todo.pop()
        if step == "..":
            real = real.rpartition("/")[0]
        elif step not in ("", "."):
            here = f"{real}/{step}"
            try:
                target = os.readlink(here)  # noqa: PTH115 - as it stands
            except OSError:
                real = here
                continue
            if len(links) >= MOST_LINKS:
                return links, here
            links[here] = target
            real = "" if target.startswith("/") else real
            todo += target.split("/")[::-1]
    return links, real or "/"


def find_interpreter(path: Path) -> str | None:
    """Return the program that a script's first line names, also after `env`; None if there is none."""
    try:
        with path.open("rb") as file:
            first = file.readline(LONGEST_FIRST_LINE)
    except OSError:
        return None  # the file is executable but not readable
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if words and Path(words[0]).name == "env" and shutil.which(words[0]) is not None:
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return words[0] if words else None


def _find_package(program: Path) -> list[str]:
    """Return the directories installed with a program, as far as its path shows."""
    parts = program.parts
    for name, inclusive in ((".pnpm", 0), ("node_modules", 1), ("Cellar", 0)):
        if name in parts[:-1]:
            return [str(Path(*parts[: parts.index(name) + inclusive]))]
    if program.parent.name == "shims":  # of pyenv, rbenv, asdf, mise: a shim starts programs beside it
        return [str(program.parent.parent)]
    if len(parts) > 3 and parts[1] == "opt":
        return [str(Path(*parts[:3]))]
    prefix = program.parent.parent
    if program.parent.name not in ("bin", "sbin") or prefix == Path("/"):
        return []
    marked = any((prefix / name).exists() for name in ("pyvenv.cfg", "conda-meta"))
    if marked and not _holds_more(prefix):
        return [str(prefix)]
    if marked or any(prefix.glob("lib/python3*")) or (prefix / "lib" / "node_modules").is_dir():
        return [str(prefix / name) for name in PREFIX_PARTS if (prefix / name).exists()]
    return []


def _holds_more(prefix: Path) -> bool:
    """Return whether the prefix contains the current directory or the user's home."""
    try:
        home = Path(os.path.realpath(pwd.getpwuid(os.getuid()).pw_dir))
    except KeyError:
        home = Path.cwd()
    return any(place.resolve().is_relative_to(prefix) for place in (Path.cwd(), home))
