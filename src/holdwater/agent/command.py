"""Agents that are a program: any command, run in the sandbox with the model's URL and key.

The template is split into words first and filled in afterwards, so no value ever becomes a shell word.
"""

from __future__ import annotations

import shlex
import shutil
import string
from collections.abc import Mapping
from pathlib import Path

from ..core.authoring import Agent, Model, Sandbox
from ..core.errors import AGENT_MISSING, AgentFailed, BadInput, ModelFailed, RunFailed, SandboxFailed
from ..core.records import CommandResult, Instance
from .programs import find_interpreter

OF_THE_MODEL = ("model", "model_url", "model_key")
PLACEHOLDERS = ("id", "instruction", "instruction_file", "workdir", *OF_THE_MODEL)
LONGEST_ARGUMENT = 128 * 1024 - 1  # bytes that Linux takes in one argument
LONGEST_REASON = 2000  # characters of output that a failure quotes
NOT_FOUND = 127  # what a shell, or a sandbox that starts programs by one, says of a missing program
SHELLS = ("sh", "bash", "dash", "zsh")  # what follows them may be a line that names programs
MISSING = "missing"  # how a sandbox that looks first calls it

Part = tuple[str, str | None]  # literal text, and the placeholder that follows it


def command(template: str) -> Agent:
    """An agent that runs `template`; its answer is what the program printed.

    The instruction arrives as `{instruction}`, or else as a file (`{instruction_file}`,
    `HOLDWATER_INSTRUCTION_FILE`). The model arrives as `{model}`, `{model_url}` (which ends in `/v1`) and
    `{model_key}`, in `HOLDWATER_MODEL`, and in the variables of `_model_variables`.
    """
    words = _parse(template)
    program = words[0][0][0]
    used = {name for word in words for _, name in word}
    by_file = "instruction" not in used or "instruction_file" in used

    async def act(instance: Instance, sandbox: Sandbox, model: Model) -> str:
        if by_file:
            await sandbox.write(instruction_file(sandbox), instance.instruction)
        values = _values(instance, sandbox) | _model_values(model, not used.isdisjoint(OF_THE_MODEL))
        filled = [program, *(_fill(word, values) for word in words[1:])]
        return (await run(program, filled, sandbox, _environment(values, by_file))).stdout

    def check() -> None:
        # A path may exist in the sandbox alone, where only the first attempt can look.
        if "/" not in program:
            look_for(program)

    return Agent(
        name=f"command:{program}",
        act=act,
        needs_model=not used.isdisjoint(OF_THE_MODEL),
        check=check,
        description=f"runs `{template}`",
        paths=find_paths(program, *("".join(text for text, _ in word) for word in words[1:])),
        notes=tuple(_describe_relative(word[0][0]) for word in words[1:] if _is_relative_file(word)),
    )


def find_paths(program: str, *words: str) -> tuple[str, ...]:
    """What of this machine a command names: programs by their names, and files by their absolute paths."""
    named = [token for word in words for token in _tokens(word)] if Path(program).name in SHELLS else []
    found = [shutil.which(name) if "/" not in name else name for name in (program, *named)]
    files = [path for path in found if path and _exists(path) and not Path(path).is_dir()]
    paths = dict.fromkeys((*files, *filter(_exists, words)))
    return tuple(path for path in paths if path.startswith("/"))


def _is_relative_file(word: list[Part]) -> bool:
    """Whether it names a file of the current directory, which no sandbox starts in."""
    name = word[0][0]
    return all(placeholder is None for _, placeholder in word) and not name.startswith("/") and _is_file(name)


def _describe_relative(name: str) -> str:
    return (
        f"`{name}` in the agent's command is looked for in the sandbox's working directory; "
        f"the file here is `{Path(name).absolute()}`"
    )


def _tokens(line: str) -> list[str]:
    """The words of a line of shell, operators and quotes aside."""
    try:
        return list(shlex.shlex(line, posix=True, punctuation_chars=True))
    except ValueError:
        return line.split()


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long, or with a NUL: no path of any file
        return False


def _is_file(path: str) -> bool:
    return _exists(path) and Path(path).is_file()


async def run(
    program: str, words: list[str], sandbox: Sandbox, env: Mapping[str, str], install: str = ""
) -> CommandResult:
    """Run `words`, which start `program`, to a good end; any other status is the agent's failure.

    A missing program will hit every instance, so it is the run's failure.
    """
    try:
        result = await sandbox.run(words, env=env)
    except SandboxFailed as error:
        if error.kind != MISSING:
            raise
        raise _missing(program, install) from None
    if result.exit_code == NOT_FOUND and not await _is_there(program, sandbox):
        raise _missing(program, install)
    if not result.ok:
        reason = (result.stderr.strip() or result.stdout.strip())[-LONGEST_REASON:]
        raise AgentFailed(f"`{program}` ended with status {result.exit_code}: {reason}", kind="exit")
    return result


def look_for(program: str, install: str = "") -> None:
    """RunFailed where no directory of PATH has it, or where its interpreter is missing."""
    found = shutil.which(program)
    if found is None:
        raise _missing(program, install)
    interpreter = find_interpreter(Path(found))
    if interpreter is not None and shutil.which(interpreter) is None:
        raise RunFailed(
            f"the interpreter of the agent's program `{program}` is missing: `{interpreter}`",
            hint=f"install it, or mend the first line of `{found}`",
            kind=AGENT_MISSING,
        )


def instruction_file(sandbox: Sandbox) -> str:
    """Where the instruction is written, outside the working directory: there it would count as work."""
    return f"{sandbox.private}/instruction.md"


def argument(text: str, hint: str) -> str:
    """`text`, if it can be an argument."""
    if "\0" in text or len(text.encode()) > LONGEST_ARGUMENT:
        problem = "has a NUL character" if "\0" in text else f"is longer than {LONGEST_ARGUMENT} bytes"
        raise AgentFailed(f"an argument of the agent's command {problem}", hint=hint, kind="argument")
    return text


def _parse(template: str) -> list[list[Part]]:
    try:
        words = [_parts(word) for word in shlex.split(template)]
    except ValueError as error:
        raise BadInput(f"cannot read the agent's command: {error}: `{template}`") from None
    if not words or words[0] == [("", None)]:
        raise BadInput("the agent's command is empty", hint="for example: --command 'my-agent {instruction}'")
    if any(name is not None for _, name in words[0]):
        raise BadInput(f"the agent's program cannot be a placeholder: `{shlex.split(template)[0]}`")
    return words


def _parts(word: str) -> list[Part]:
    hint = "write `{{` and `}}` for braces that are meant as they are; known are " + ", ".join(
        f"`{{{name}}}`" for name in PLACEHOLDERS
    )
    try:
        parsed = list(string.Formatter().parse(word))
    except ValueError:
        raise BadInput(f"a brace without its partner in the agent's command: `{word}`", hint=hint) from None
    for _, name, form, conversion in parsed:
        if name is not None and (name not in PLACEHOLDERS or form or conversion):
            raise BadInput(f"unknown placeholder in the agent's command: `{word}`", hint=hint)
    return _merged([(literal, name) for literal, name, _, _ in parsed])


def _merged(parts: list[Part]) -> list[Part]:
    """Escaped braces come as parts of their own; a word without placeholders is one part."""
    if all(name is None for _, name in parts):
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
    """What is to be known of the model; a run without one is fine for a program that names none."""
    try:
        return {"model": model.name, "model_url": model.sandbox_url, "model_key": model.key}
    except ModelFailed:
        if needed:
            raise
        return {}


def _fill(word: list[Part], values: Mapping[str, str]) -> str:
    filled = "".join(literal + (values[name] if name else "") for literal, name in word)
    return argument(filled, "use `{instruction_file}`")


def _environment(values: Mapping[str, str], by_file: bool) -> dict[str, str]:
    environment = {"HOLDWATER_ID": values["id"], "HOLDWATER_WORKDIR": values["workdir"]}
    if by_file:
        environment["HOLDWATER_INSTRUCTION_FILE"] = values["instruction_file"]
    if "model" in values:
        environment["HOLDWATER_MODEL"] = values["model"]
        environment |= _model_variables(values["model_url"], values["model_key"])
    return environment


def _model_variables(url: str, key: str) -> dict[str, str]:
    """The variables that the SDKs of the four dialects read; only OpenAI's take a URL with `/v1`."""
    root = url.removesuffix("/v1")
    return {
        **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), url),
        **dict.fromkeys(("ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL"), root),
        **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY"), key),
    }


async def _is_there(program: str, sandbox: Sandbox) -> bool:
    """A program that is there may end with 127 as well: it may miss another."""
    return (await sandbox.run(["sh", "-c", 'command -v "$1"', "sh", program])).ok


def _missing(program: str, install: str) -> RunFailed:
    hint = f"`{install}`" if install else "install it, or give its absolute path"
    if "/" in program and Path(program).is_file() and not Path(program).is_absolute():
        here = Path(program).absolute()
        hint = f"a relative path is one of the sandbox's working directory: name `{here}` for the one here"
    return RunFailed(f"the agent's program is missing: `{program}`", hint=hint, kind=AGENT_MISSING)
