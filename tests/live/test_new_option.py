"""A new option is one field of the configuration: flag, TOML setting, keyword and `run.json` follow."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command_runner import SOURCE
from tests.wait_bounds import stretch

FIELD = '    zeal: Annotated[int, ConfigOption(MACHINE, "How hard to try", least=1, resume="Zeal")] = 3\n'
RUN = ("run", "demo", "--agent", "nop", "--limit", "1", "--workers", "0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package whose configuration has one more field."""
    place = tmp_path_factory.mktemp("zeal")
    shutil.copytree(SOURCE / "holdwater", place / "holdwater")  # with its compiled modules
    config = place / "holdwater/core/config.py"
    before, end, after = config.read_text().partition("    recipe: ImageRecipe | None = None")
    config.write_text(before + FIELD + end + after)
    return place


def python(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=stretch(60),
        cwd=place,
        env={"PYTHONPATH": str(place), "PATH": "/usr/bin:/bin"},
        check=False,
    )


def holdwater(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(place, "-m", "holdwater", *words)


def kept(run: Path) -> object:
    return json.loads((run / "run.json").read_text()).get("zeal")


def test_a_new_field_is_a_flag_that_run_json_keeps(place: Path) -> None:
    done = holdwater(place, *RUN, "--zeal", "5", "--out", "flag", "--quiet")

    assert done.returncode == 0, done.stderr
    assert kept(place / "flag") == 5
    assert "--zeal INT                How hard to try" in holdwater(place, "run", "--help").stdout
    assert "--zeal" in holdwater(place, "serve", "--help").stdout


def test_a_new_field_is_checked_like_the_others(place: Path) -> None:
    done = holdwater(place, *RUN, "--zeal", "0")

    assert (done.returncode, done.stderr) == (2, "error: `--zeal` must be at least 1: 0\n")


def test_a_new_field_is_a_setting_of_a_toml_file(place: Path) -> None:
    (place / "run.toml").write_text("zeal = 7\n")

    done = holdwater(place, *RUN, "--config", "run.toml", "--dry-run", "--json")

    assert json.loads(done.stdout)["config"]["zeal"] == 7


def test_a_new_field_is_a_keyword_of_the_library_and_of_resume(place: Path) -> None:
    code = "import holdwater as hw; hw.run('demo', 'nop', limit=1, workers=0, zeal=8, out='library')"
    run = python(place, "-c", code)

    again = holdwater(place, "resume", "library", "--zeal", "9", "--quiet")

    assert (run.returncode, again.returncode) == (0, 0), run.stderr + again.stderr
    assert kept(place / "library") == 9
