"""The benchmark's own evaluation script, made fit to be believed: marks that cannot be guessed, the tests'
own status, and where pytest runs them a report of its own beside what is printed. Running it is in
`grading.py`, reading what comes out in `judge.py`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

START = ">>>>> Start Test Output"
END = ">>>>> End Test Output"
HEAD = ("#!/bin/bash", "set -uxo pipefail")  # as the reference runs every script
STATUS = "HOLDWATER_STATUS"
PYTEST = re.compile(r"(\s*(?:\w+=\S+\s+)*(?:\S*python[\d.]*\s+-m\s+|\S*/)?(?:pytest|py\.test))(?=\s|$)")
HEREDOC = re.compile(r"git apply\b.*<<-?\s*['\"]?(\w+)['\"]?")
# A repository may have turned pytest's own reports off (`-p no:junitxml`): this plugin has another name.
REPORTER = """\
from _pytest import junitxml
ours = []
def pytest_configure(config):
    if not config.pluginmanager.hasplugin("junitxml"):
        ours.append(True)
        junitxml.pytest_configure(config)
def pytest_unconfigure(config):
    if ours:
        junitxml.pytest_unconfigure(config)
"""
NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")


class Evaluation(NamedTuple):
    text: str
    start: str  # the line that holds this begins the tests' output
    end: str
    report: str | None  # where pytest writes its own report


class Parts(NamedTuple):
    """A script's lines: before the tests, the tests themselves, and after them."""

    before: list[str]
    tests: list[str]
    after: list[str]


def markers_in(script: str) -> bool:
    return _parts(script) is not None


def evaluation(script: str, nonce: str, workdir: str, before: Sequence[str] = ()) -> Evaluation:
    """`script` to be run; `before` is what it does right before the tests."""
    parts = _parts(script)
    assert parts is not None, "rows are checked"
    place, plugin = f"{workdir}/.git/holdwater-{nonce}", f"holdwater_{nonce}"
    report = f"{place}/report.xml"
    tests, watched = _watched(parts.tests, place, plugin, report)
    if watched:
        module = shlex.quote(f"{place}/{plugin}.py")
        before = [*before, f"mkdir -p {shlex.quote(place)} && printf %s {shlex.quote(REPORTER)} > {module}"]
    start, end = f"{START} {nonce}", f"{END} {nonce}"
    lines = [
        *HEAD,
        "{",  # read as a whole before anything of it runs: what it runs could change it
        *parts.before,
        *before,
        f": '{start}'",
        *tests,
        f"{STATUS}=$?",
        f": '{end}'",
        *parts.after,
        f'exit "${STATUS}"',
        "}",
    ]
    return Evaluation("\n".join(lines) + "\n", start, end, report if watched else None)


def with_tests(script: str, theirs: Sequence[str], ours: Sequence[str]) -> str:
    """`script` without the benchmark's own tests, the files `theirs`: the files `ours` are run instead."""
    parts = _parts(script)
    assert parts is not None, "rows are checked"
    before = [line for line in _without_patch(parts.before) if not any(name in line for name in theirs)]
    tests = [_directed(line, theirs, ours) for line in parts.tests]
    return "\n".join([*before, f": '{START}'", *tests, f": '{END}'"])


def is_test(name: str) -> bool:
    """Whether a test runner can be given this file."""
    return not name.endswith(NO_TESTS)


def _parts(script: str) -> Parts | None:
    lines = [line for line in script.strip().split("\n") if line not in HEAD]
    starts = [n for n, line in enumerate(lines) if START in line]
    ends = [n for n, line in enumerate(lines) if END in line]
    if not starts or not ends or ends[0] <= starts[0]:
        return None
    return Parts(lines[: starts[0]], lines[starts[0] + 1 : ends[0]], lines[ends[0] + 1 :])


def _watched(tests: list[str], place: str, plugin: str, report: str) -> tuple[list[str], bool]:
    """The tests with pytest's own report asked for, where exactly one line runs it."""
    found = [n for n, line in enumerate(tests) if PYTEST.match(line)]
    if len(found) != 1:
        return tests, False
    path = f"PYTHONPATH={shlex.quote(place)}${{PYTHONPATH:+:$PYTHONPATH}}"
    options = f"-p {plugin} {shlex.quote(f'--junitxml={report}')}"
    changed = [
        PYTEST.sub(rf"{path} \1 {options}", line, count=1) if n in found else line
        for n, line in enumerate(tests)
    ]
    return changed, True


def _without_patch(lines: list[str]) -> list[str]:
    kept: list[str] = []
    until: str | None = None
    for line in lines:
        if until is not None:
            until = None if line.strip() == until else until
        elif match := HEREDOC.search(line):
            until = match[1]
        else:
            kept.append(line)
    return kept


def _directed(line: str, theirs: Sequence[str], ours: Sequence[str]) -> str:
    """A test command for other files, named as it named its own: by path, or as Django names modules."""
    for named in (lambda name: name, _module):
        old, new = {named(name) for name in theirs}, [named(name) for name in ours]
        words = line.split()
        if old & set(words):
            return " ".join([*(w for w in words if w not in old), *map(shlex.quote, new)])
    return line


def _module(name: str) -> str:
    return name.removesuffix(".py").removeprefix("tests/").replace("/", ".")
