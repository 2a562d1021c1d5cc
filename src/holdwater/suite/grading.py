"""Grades an instance by its grade command, for suites whose instances carry one.

An agent's work can end with any status, so status 127 alone does not show that a program is missing. Programs
are searched in the suite's own text only: no file that an agent leaves can make a program look missing.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence

from ..core.authoring import Sandbox
from ..core.environment import GRADING_VARIABLES
from ..core.errors import GradeFailed
from ..core.records import CommandResult, Grade, Instance

EXPECTED = "holdwater.expected"  # key in an instance's data: the output that the grade command must print
LONGEST_DETAIL = 4000  # characters of output that a grade keeps
CANNOT_RUN = (126, 127)  # exit statuses of a shell for a command that is not executable or not found
PROBE_SECONDS = 60.0
LONGEST = 100_000  # characters; longer commands are not analysed
TESTS = "HOLDWATER_TESTS"  # environment variable: the directory of the instance's test files
# Prints the names for which there is no program. If PATH contains the working directory, the agent may have
# removed a program, so none counts as missing.
PROBE = r"""
case ":$PATH:" in *:[!/]* | *:"$PWD":* | *:"$PWD"/*) exit 0 ;; esac
for name; do
    case $name in
    */*) [ -f "$name" ] && [ -x "$name" ] ;;
    *) command -v "$name" > /dev/null ;;
    esac || printf '%s\n' "$name"
done
exit 0
"""

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|\\\n)
    | (?P<comment>(?<![^\s;|&()])\#[^\n]*)
    | (?P<redirect>\d*(?:&>>?|<>|[<>]{1,2}[&|]?))
    | (?P<operator>&&|\|\||[;|&()\n])
    | (?P<word>(?:[^\s;|&()<>'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+)""",
    re.VERBOSE | re.DOTALL,
)
_OWN_NAMES = re.compile(r"\(\s*\)|\bPATH=")  # the text defines functions or changes PATH
_UNCLEAR = re.compile(r"\(\(|<<|;;")  # after these operators a word may not be a program
_CHANGES = frozenset({".", "source", "eval", "alias", "function", "case"})  # nor after these commands
_NAME = re.compile(r"[A-Za-z_][\w.+-]*|\[\[")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=.*", re.DOTALL)
_PREFIXES = frozenset({"!", "{", "if", "then", "elif", "else", "while", "until", "do"})
_WRAPPERS = frozenset({"env", "exec", "nice", "nohup", "time", "timeout"})  # each starts the next word
_DURATION = re.compile(r"\d+(?:\.\d+)?[smhd]?")
_WITH_VALUE = frozenset({"-a", "-C", "-k", "-n", "-s", "-u"})  # options of wrappers that take a value
_SHELLS = frozenset({"bash", "dash", "sh"})
_SCRIPT = re.compile(
    rf"""(?:^|[\s;&|(/])(?:{"|".join(_SHELLS)})(?:\ +-\w+)*\ +  # `sh -e`
    ["']?\$\{{?{TESTS}\}}?["']?/(?P<path>[\w./-]+)""",
    re.VERBOSE,
)


async def command_grade(instance: Instance, sandbox: Sandbox, answer: object = None) -> Grade:
    """Run the instance's `grade` command: it passes with status 0 and the expected output, if any."""
    if not instance.grade:
        raise GradeFailed(f"instance `{instance.id}` has no grade command", again=False)
    directory = await put_tests(instance.tests, sandbox) if instance.tests else ""
    result = await sandbox.run(instance.grade, env={TESTS: directory} if directory else {})
    programs = find_programs(instance.grade, instance.tests, directory, sandbox.workdir)
    await check_started(result, programs, sandbox)
    grade = as_grade(result)
    expected = instance.data.get(EXPECTED)
    if not grade.passed or expected is None or result.stdout.strip() == expected.strip():
        return grade
    return Grade(passed=False, score=0.0, detail=f"unexpected output: {tail(result.output, 1000)}")


async def put_tests(tests: Mapping[str, str | bytes], sandbox: Sandbox) -> str:
    """Write test files to a directory outside the working directory; return the directory's path.

    The name is random, so a link that the agent leaves cannot point there.
    """
    directory = f"{sandbox.private}/tests-{secrets.token_hex(8)}"
    for path, content in tests.items():
        await sandbox.write(f"{directory}/{path}", content)
    return directory


async def check_started(result: CommandResult, programs: Sequence[str], sandbox: Sandbox) -> None:
    """Raise GradeFailed if the shell could not start the command and one of `programs` is missing.

    If no program is missing, the exit status comes from the agent's work and counts as a grade.
    """
    if result.timed_out or result.exit_code not in CANNOT_RUN:
        return
    if missing := await find_missing(programs, sandbox):
        reason = tail(result.output, 300) or f"status {result.exit_code}"
        raise GradeFailed(
            f"the grade command cannot be run: {reason}",
            hint=f"is `{missing[0]}` in the sandbox and executable?",
        )


def as_grade(result: CommandResult) -> Grade:
    """Return the grade for a finished command; raise GradeFailed if it timed out."""
    if result.timed_out:
        raise GradeFailed(f"the grade command timed out after {result.seconds:.0f} s", kind="timeout")
    return Grade(passed=result.ok, score=float(result.ok), detail=tail(result.output))


def tail(text: str, characters: int = LONGEST_DETAIL) -> str:
    """Return the end of `text`, where programs print their errors."""
    text = text.strip()
    return text if len(text) <= characters else "..." + text[-characters:]


async def find_missing(names: Sequence[str], sandbox: Sandbox) -> list[str]:
    """Return the names (or absolute paths) of programs that are not in the sandbox."""
    if not names:
        return []
    probe = await sandbox.run(["sh", "-c", PROBE, "sh", *names], env=GRADING_VARIABLES, timeout=PROBE_SECONDS)
    if not probe.ok:
        raise GradeFailed(f"the grade command and `sh` cannot be run: {probe.output.strip()[-300:]}")
    return probe.stdout.splitlines()


def find_programs(line: str, tests: Mapping[str, str | bytes], directory: str, workdir: str) -> list[str]:
    """Return the programs that a grade command, and the shell scripts of `tests` that it runs, start by name.

    Only programs that can be identified and are outside the working directory are returned. `directory` holds
    the tests.
    """
    scripts = [tests.get(found["path"], "") for found in _SCRIPT.finditer(line)]
    texts = [line, *(script for script in scripts if isinstance(script, str))]
    words = [word for text in texts if len(text) <= LONGEST for word in _find_certain(text)]
    inside = f"{workdir.rstrip('/')}/"
    names = (_expand(word, directory) for word in words)
    return list(dict.fromkeys(name for name in names if name and not name.startswith(inside)))


def _find_certain(text: str) -> list[str]:
    """Return the commands of a text that almost certainly name a program."""
    if _OWN_NAMES.search(text):
        return []
    commands = list(_find_commands(text))
    return commands[:1] if _UNCLEAR.search(text) or _CHANGES.intersection(commands) else commands


def _find_commands(text: str) -> Iterator[str]:
    """Yield the words of a text that stand where a shell expects a command."""
    for words in _split(text):
        rest = iter(words)
        is_wrapped = False
        for word in rest:
            if word in _PREFIXES or _ASSIGNMENT.match(word) or (is_wrapped and _DURATION.fullmatch(word)):
                continue
            if is_wrapped and word.startswith("-"):
                if word in _WITH_VALUE:
                    next(rest, None)
                continue
            yield word
            if word in _SHELLS:
                yield from _find_inner(list(rest))
            is_wrapped = word in _WRAPPERS
            if not is_wrapped:
                break


def _find_inner(words: Sequence[str]) -> Iterator[str]:
    """Yield the commands of the line in `sh -c LINE`."""
    if len(words) > 1 and re.fullmatch(r"-\w*c", words[0]):
        try:
            yield from _find_commands(shlex.split(words[1])[0])
        except (ValueError, IndexError):
            return  # a shell would reject this line


def _split(text: str) -> Iterator[list[str]]:
    """Yield each simple command of a text as a list of words, still quoted and without redirections."""
    words: list[str] = []
    is_target = False
    for token in _TOKEN.finditer(text):
        if token["operator"]:
            yield words
            words = [")"] if token["operator"] == ")" else []  # words after `$(...)` are not commands
        elif token["word"] and not is_target:
            words.append(token["word"])
        is_target = bool(token["redirect"]) or (is_target and bool(token["space"]))
    yield words


def _expand(word: str, directory: str) -> str:
    """Return a program name or an absolute path; an empty string for anything else."""
    plain = word.replace('"', "").replace("'", "")
    for variable in (f"${TESTS}/", f"${{{TESTS}}}/"):
        if directory and plain.startswith(variable):
            plain = f"{directory}/{plain.removeprefix(variable)}"
    is_path = plain.startswith("/") and ".." not in plain and not re.search(r"[\s$`*?\\\[]", plain)
    return plain if is_path or _NAME.fullmatch(plain) else ""
