"""Help that an installed package has: every page of the manual by its topic, and no file that is missing."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from tests.forked_command import run_forked

from holdwater.cli import VERBS, main
from holdwater.cli.help import find_pages
from holdwater.version import __version__

ROOT = Path(__file__).parents[2]


def printed(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capfd.readouterr().out


def test_a_topic_is_its_page(capfd: pytest.CaptureFixture[str]) -> None:
    for path in (ROOT / "docs").glob("*.md"):
        assert printed(capfd, "help", path.stem) == path.read_text()


def test_the_overview_lists_every_topic(capfd: pytest.CaptureFixture[str]) -> None:
    overview = printed(capfd, "help")

    listed = overview.partition("Topics:")[2].replace(",", " ").split()
    assert listed == sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
    assert overview == printed(capfd, "--help")


def test_a_verb_is_a_topic_too() -> None:
    helped, told = run_forked("help", "resume"), run_forked("resume", "--help")

    assert helped.returncode == told.returncode == 0
    assert helped.stdout == told.stdout


def test_an_unknown_topic_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "modles"]) == 2
    told = capfd.readouterr().err
    assert told == "error: unknown topic: `modles`\nhint: did you mean `holdwater help models`?\n"


def test_the_wheel_has_the_manual() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]

    assert built["force-include"] == {"docs": "holdwater/manual"}


def test_no_help_cites_a_file_that_is_not_installed() -> None:
    for path in (ROOT / "src" / "holdwater").rglob("*.py"):
        assert not re.search(r"see `?docs/\w+\.md", _texts(path)), path


def test_every_help_that_a_message_names_exists() -> None:
    named = {
        topic
        for path in (ROOT / "src" / "holdwater").rglob("*.py")
        for topic in re.findall(r"`holdwater help ([a-z]+)`", path.read_text())
    }
    assert named <= {*find_pages(), *VERBS}
    assert named


def test_the_version_is_a_verb(capfd: pytest.CaptureFixture[str]) -> None:
    assert printed(capfd, "version") == printed(capfd, "--version") == f"{__version__}\n"
    assert json.loads(printed(capfd, "version", "--json"))["holdwater"] == __version__


def _texts(path: Path) -> str:
    """The file without its comments: they are for people who have the repository."""
    return re.sub(r"#.*", "", path.read_text())
