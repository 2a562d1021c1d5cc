"""The docs are held to the code: verbs, flags, options, fields and the failure table are really there."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import holdwater
from holdwater.api.runs import ResumeOptions, RunOptions
from holdwater.cli import VERBS
from holdwater.cli.run_flags import ResumeFlags, RunFlags
from holdwater.cli.sandboxd import SandboxServerFlags
from holdwater.cli.serve import ServerFlags as ServeFlags
from holdwater.cli.view import ExportFlags
from holdwater.core.config import RunConfig
from holdwater.core.failures import RULES, RetryRule
from holdwater.core.options import list_options
from holdwater.core.records import FailureOrigin
from holdwater.run.setup.options import RETRY_OPTIONS
from holdwater.suite.jsonl import SuiteRow

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHER_FLAGS = {
    "index",
    "out",
    "trust",
    "attack",
    "suite",
    "config",
    "dir",
    "dry-run",
    "json",
    "quiet",
    "accept-changes",
    "what",
    "format",
    "watch",
    "now",
    "read-only",
    "listen",
    "view",
    "peers",
    "by",
    "fail-if-worse",
    "attempt",
    "sample",
    "turn",
    "say",
    "then-say",
    "drift",
    "bisect",
    "raw",
    "all",
    "older-than",
    "compress",
    "remove",
    "unfinished",
    "yes",
    "engine",
    "deep",
    "force",
    "cache",
    "keep",
}
# Flags of programs that the docs mention, and of benchmarks.
NOT_OURS = {"die-with-parent", "task", "prompt-file", "minutes", "hours", "plot", "help", "warm", "against"}
NOT_OURS |= {"beside"}
# Flags of verifiers, in the table of its page.
NOT_OURS |= {"env", "max-concurrent", "resume", "select"}
# Flags of docker, pip and kubectl.
NOT_OURS |= {"build-arg", "wheel-dir", "file", "tag", "from-literal"}
# Flags of the OpenHands benchmarks.
NOT_OURS |= {"headless", "num-workers", "n-limit", "max-attempts", "max-iterations", "max-retries"}


def flags() -> set[str]:
    kinds = (RunFlags, ServeFlags, ResumeFlags, SandboxServerFlags, ExportFlags)
    return {field.name.replace("_", "-") for kind in kinds for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_verb_that_a_page_types_exists(page: Path) -> None:
    typed = re.findall(r"(?:^\$ |`)holdwater ([a-z]+)", page.read_text(), re.MULTILINE)

    assert set(typed) <= set(VERBS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"--([a-z][a-z-]+)", page.read_text())

    assert set(named) - flags() - OTHER_FLAGS - NOT_OURS == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_compile_and_use_names_that_exist(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        tree = ast.parse(block)
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hw"
        }
        assert used <= set(holdwater.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_flag_is_an_option_of_the_library_too() -> None:
    beside = {"agent", "command"}  # an argument of its own there

    assert {field.name for field in dataclasses.fields(RunFlags)} - beside <= set(RunOptions.__annotations__)
    assert {field.name for field in dataclasses.fields(ResumeFlags)} == set(ResumeOptions.__annotations__)


def test_type_checkers_see_the_options_of_the_configuration() -> None:
    options = list_options(RunConfig)
    changes = {name for name, entry in options.items() if entry.option.resume}

    assert set(RunOptions.__annotations__) == set(options)
    assert set(ResumeOptions.__annotations__) == changes | RETRY_OPTIONS


def test_the_failure_table_in_the_manual_is_the_one_in_core() -> None:
    text = (ROOT / "docs" / "running.md").read_text()
    rows = re.findall(r"^\| ([a-z, ]+) \| .* \| (.*) \| (.*) \| (\d)(?: if left)? \|$", text, re.MULTILINE)
    documented = {
        where: (again, int(status)) for names, again, _, status in rows for where in names.split(", ")
    }

    later = {FailureOrigin.IMAGE, FailureOrigin.BUDGET}  # nothing fails there yet
    assert set(documented) == {str(where) for where in RULES if where not in later}
    for where, (again, status) in documented.items():
        rule = RULES[FailureOrigin(where)]
        assert status == rule.exit_status, where
        if rule.again in (RetryRule.ATTEMPTS, RetryRule.RETRIES):
            assert str(rule.again) in again, where


def test_the_manual_names_every_field_of_a_jsonl_row() -> None:
    text = (ROOT / "docs" / "suites.md").read_text()

    assert {field for field in SuiteRow.__struct_fields__ if f"| `{field}` |" not in text} == set()
