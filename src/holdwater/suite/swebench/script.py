"""Hardens the benchmark's evaluation script, so that its result can be trusted.

It adds marks that cannot be guessed, the tests' own exit status and, where pytest runs the tests, a report
besides the printed output. `grading.py` runs the script; `judge.py` reads its output.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

START = ">>>>> Start Test Output"
END = ">>>>> End Test Output"
HEAD = ("#!/bin/bash", "set -uxo pipefail")  # the first lines of every script of the reference
STATUS = "HOLDWATER_STATUS"
PYTEST = re.compile(r"(\s*(?:\w+=\S+\s+)*(?:\S*python[\d.]*\s+-m\s+|\S*/)?(?:pytest|py\.test))(?=\s|$)")
HEREDOC = re.compile(r"git apply\b.*<<-?\s*['\"]?(\w+)['\"]?")
# A repository may disable pytest's reports (`-p no:junitxml`), so this plugin has another name.
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


class EvaluationScript(NamedTuple):
    text: str
    start: str  # the tests' output begins at the line that contains this text
    end: str
    report: str | None  # path of pytest's own report


class ScriptParts(NamedTuple):
    """A script's lines: before the tests, the tests and after them."""

    before: list[str]
    tests: list[str]
    after: list[str]


def has_markers(script: str) -> bool:
    return _split_script(script) is not None


def make_evaluation(script: str, nonce: str, workdir: str, before: Sequence[str] = ()) -> EvaluationScript:
    """Return `script` ready to run; the lines `before` run directly before the tests."""
    parts = _split_script(script)
    assert parts is not None, "rows are checked"
    place, plugin = f"{workdir}/.git/holdwater-{nonce}", f"holdwater_{nonce}"
    report = f"{place}/report.xml"
    tests, watched = _add_reporter(parts.tests, place, plugin, report)
    if watched:
        module = shlex.quote(f"{place}/{plugin}.py")
        before = [*before, f"mkdir -p {shlex.quote(place)} && printf %s {shlex.quote(REPORTER)} > {module}"]
    start, end = f"{START} {nonce}", f"{END} {nonce}"
    lines = [
        *HEAD,
        "{",  # bash reads the whole block before it runs it: the tests could change the file
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
    return EvaluationScript("\n".join(lines) + "\n", start, end, report if watched else None)


def replace_tests(script: str, theirs: Sequence[str], ours: Sequence[str]) -> str:
    """Return `script` with the benchmark's own test files `theirs` replaced by the files `ours`."""
    parts = _split_script(script)
    assert parts is not None, "rows are checked"
    before = [line for line in _remove_patch(parts.before) if not any(name in line for name in theirs)]
    tests = [_retarget_command(line, theirs, ours) for line in parts.tests]
    return "\n".join([*before, f": '{START}'", *tests, f": '{END}'"])


def is_test(name: str) -> bool:
    """Return whether a test runner accepts this file."""
    return not name.endswith(NO_TESTS)


def _split_script(script: str) -> ScriptParts | None:
    lines = [line for line in script.strip().split("\n") if line not in HEAD]
    starts = [n for n, line in enumerate(lines) if START in line]
    ends = [n for n, line in enumerate(lines) if END in line]
    if not starts or not ends or ends[0] <= starts[0]:
        return None
    return ScriptParts(lines[: starts[0]], lines[starts[0] + 1 : ends[0]], lines[ends[0] + 1 :])


def _add_reporter(tests: list[str], place: str, plugin: str, report: str) -> tuple[list[str], bool]:
    """Return the tests with a pytest report enabled, if exactly one line runs pytest; and whether it is."""
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


def _remove_patch(lines: list[str]) -> list[str]:
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


def _retarget_command(line: str, theirs: Sequence[str], ours: Sequence[str]) -> str:
    """Return the test command for other files, named in the same way: by path, or as a Django module."""
    for named in (lambda name: name, _module_name):
        old, new = {named(name) for name in theirs}, [named(name) for name in ours]
        words = line.split()
        if old & set(words):
            return " ".join([*(w for w in words if w not in old), *map(shlex.quote, new)])
    return line


def _module_name(name: str) -> str:
    return name.removesuffix(".py").removeprefix("tests/").replace("/", ".")
