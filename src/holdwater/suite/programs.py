"""Finds the programs that a grade command names, and tells which of them a sandbox lacks.

An agent's work can end with any status, so status 127 alone does not show that a program is missing. Only the
suite's own text is read here: nothing that an agent leaves makes a program of the suite look missing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from ..core.authoring import Sandbox
from ..core.errors import GradeFailed
from ..core.variables import GRADING

PROBING = 60.0  # seconds
LONGEST = 100_000  # characters of a command that is looked at
TESTS = "HOLDWATER_TESTS"  # where a grade command finds the files that its instance has for it
# Prints the names that no program has. Where PATH leads into the working directory, the agent may have
# removed one, so none counts as missing.
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
_OWN_NAMES = re.compile(r"\(\s*\)|\bPATH=")  # functions, or programs found elsewhere
_UNCLEAR = re.compile(r"\(\(|<<|;;")  # a word behind an operator may be no program
_CHANGES = frozenset({".", "source", "eval", "alias", "function", "case"})  # so it may behind these
_NAME = re.compile(r"[A-Za-z_][\w.+-]*|\[\[")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=.*", re.DOTALL)
_PREFIXES = frozenset({"!", "{", "if", "then", "elif", "else", "while", "until", "do"})
_WRAPPERS = frozenset({"env", "exec", "nice", "nohup", "time", "timeout"})  # they start what follows
_DURATION = re.compile(r"\d+(?:\.\d+)?[smhd]?")
_WITH_VALUE = frozenset({"-a", "-C", "-k", "-n", "-s", "-u"})  # options of wrappers
_SHELLS = frozenset({"bash", "dash", "sh"})
_SCRIPT = re.compile(
    rf"""(?:^|[\s;&|(/])(?:{"|".join(_SHELLS)})(?:\ +-\w+)*\ +  # `sh -e`
    ["']?\$\{{?{TESTS}\}}?["']?/(?P<path>[\w./-]+)""",
    re.VERBOSE,
)


async def find_missing(names: Sequence[str], sandbox: Sandbox) -> list[str]:
    """The programs of these names, or absolute paths, that are not in the sandbox."""
    if not names:
        return []
    probe = await sandbox.run(["sh", "-c", PROBE, "sh", *names], env=GRADING, timeout=PROBING)
    if not probe.ok:
        raise GradeFailed(f"the grade command cannot be run, nor `sh`: {probe.output.strip()[-300:]}")
    return probe.stdout.splitlines()


def find_programs(line: str, tests: Mapping[str, str | bytes], directory: str, workdir: str) -> list[str]:
    """The programs that a grade command, and shell scripts of `tests` that it runs, start by their names.

    Only those that can be told and are not in the working directory; `directory` has the tests.
    """
    scripts = [tests.get(found["path"], "") for found in _SCRIPT.finditer(line)]
    texts = [line, *(script for script in scripts if isinstance(script, str))]
    words = [word for text in texts if len(text) <= LONGEST for word in _find_certain(text)]
    inside = f"{workdir.rstrip('/')}/"
    names = (_expand(word, directory) for word in words)
    return list(dict.fromkeys(name for name in names if name and not name.startswith(inside)))


def _find_certain(text: str) -> list[str]:
    """The commands of a text that name a program, with little doubt."""
    if _OWN_NAMES.search(text):
        return []
    commands = list(_find_commands(text))
    return commands[:1] if _UNCLEAR.search(text) or _CHANGES.intersection(commands) else commands


def _find_commands(text: str) -> Iterator[str]:
    """The words of a text that stand where a shell expects a command."""
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
    """The commands of the line in `sh -c LINE`."""
    if len(words) > 1 and re.fullmatch(r"-\w*c", words[0]):
        try:
            yield from _find_commands(shlex.split(words[1])[0])
        except (ValueError, IndexError):
            return  # no line that a shell would take


def _split(text: str) -> Iterator[list[str]]:
    """The simple commands of a text, each as its words, still quoted, without redirections."""
    words: list[str] = []
    is_target = False
    for token in _TOKEN.finditer(text):
        if token["operator"]:
            yield words
            words = [")"] if token["operator"] == ")" else []  # words behind `$(...)` are no command
        elif token["word"] and not is_target:
            words.append(token["word"])
        is_target = bool(token["redirect"]) or (is_target and bool(token["space"]))
    yield words


def _expand(word: str, directory: str) -> str:
    """A name or an absolute path; empty for all else."""
    plain = word.replace('"', "").replace("'", "")
    for variable in (f"${TESTS}/", f"${{{TESTS}}}/"):
        if directory and plain.startswith(variable):
            plain = f"{directory}/{plain.removeprefix(variable)}"
    is_path = plain.startswith("/") and ".." not in plain and not re.search(r"[\s$`*?\\\[]", plain)
    return plain if is_path or _NAME.fullmatch(plain) else ""
