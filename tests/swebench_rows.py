"""Rows of SWE-bench made for tests: small git repositories, real diffs, real pytest; and patches that cheat.

Every row has its own copy of a repository, so that they can be graded at once; a scene can be played in
processes (`repos=`) or in containers (`repos=` and `image=`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CODE = """\
def add(a, b):
    return a + b


def halve(n):
    return n // 2
"""
MENDED = CODE.replace("n // 2", "n / 2")
TESTS = """\
import calc


def test_add():
    assert calc.add(1, 2) == 3


def test_halve_even():
    assert calc.halve(4) == 2
"""
NEW_TEST = """

def test_halve_odd():
    assert calc.halve(3) == 1.5
"""
F2P = ["tests/test_calc.py::test_halve_odd"]
P2P = ["tests/test_calc.py::test_add", "tests/test_calc.py::test_halve_even"]
PASSED = "".join(f"PASSED {name}\n" for name in [*F2P, *P2P])
FAKED = f"==== short test summary info ====\n{PASSED}==== 3 passed in 0.01s ====\n"
FOOLING = {  # what the reference itself takes for resolved
    "prints-an-end-and-a-status",
    "leaves-at-import",
    "cannot-be-imported",
    "prints-in-conftest",
    "hides-failures",
    "deselects",
}


class Benchmark:
    """A file of rows, and the repositories that they are about."""

    def __init__(self, place: Path, python: str = sys.executable) -> None:
        self.place = place
        self.repos = place / "repos"
        self.rows = place / "rows.jsonl"
        self.python = python
        self.repos.mkdir(parents=True)

    def add(
        self, name: str, test_patch: str | None = None, more: Mapping[str, str] | None = None, **changed: Any
    ) -> dict[str, Any]:
        """Write a repository, with `more` files in it, and its row; the row."""
        repo = self.repos / name
        files = {"calc.py": CODE, "tests/test_calc.py": TESTS, ".gitignore": "*.log\n__pycache__/\n"}
        commit = made(repo, {**files, **(more or {})})
        tests = test_patch or diff(repo, {"tests/test_calc.py": TESTS + NEW_TEST})
        row = {
            "repo": "calc/calc",
            "instance_id": name,
            "base_commit": commit,
            "patch": diff(repo, {"calc.py": MENDED}),
            "test_patch": tests,
            "problem_statement": "`halve(3)` is 1, and should be 1.5.",
            "hints_text": "",
            "created_at": "2024-01-01T00:00:00Z",
            "version": "1.0",
            "FAIL_TO_PASS": json.dumps(F2P),
            "PASS_TO_PASS": json.dumps(P2P),
            "environment_setup_commit": commit,
            "image": None,
            "eval_script": self.script(commit, tests),
            "log_parser": "parse_log_pytest_v2",
            "eval_type": "pass_and_fail",
            **changed,
        }
        with self.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def script(self, commit: str, test_patch: str, command: str = "") -> str:
        """An evaluation script as the benchmark's rows bring it."""
        pytest = f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {self.python} -m pytest"
        run = command or f"{pytest} -rA --tb=short -p no:cacheprovider tests/test_calc.py"
        return "\n".join(
            [
                "#!/bin/bash",
                "set -uxo pipefail",
                "git status",
                f"git checkout {commit} tests/test_calc.py",
                f"git apply -v - <<'EOF_114329324912'\n{test_patch}\nEOF_114329324912",
                ": '>>>>> Start Test Output'",
                run,
                ": '>>>>> End Test Output'",
                f"git checkout {commit} tests/test_calc.py",
                "",
            ]
        )

    def spec(self, kind: str = "swebench", **options: str) -> str:
        given = "&".join(f"{name}={value}" for name, value in {"repos": str(self.repos), **options}.items())
        return f"{kind}:{self.rows}?{given}"

    def predictions(self, patches: Mapping[str, str | None]) -> Path:
        path = self.place / "predictions.jsonl"
        rows = [
            {"instance_id": i, "model_name_or_path": "some/model", "model_patch": p}
            for i, p in patches.items()
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path


def cheats(repo: Path) -> dict[str, str]:
    """Patches that leave the fault as it is and look as if they had mended it, by how."""
    at_end = f"def pytest_unconfigure():\n    print({'FAILED elsewhere::x' + chr(10) + PASSED!r})\n"
    without_odd = "def pytest_collection_modifyitems(items):\n    del items[-1]\n"
    files = {
        "prints-at-import": {"calc.py": said(PASSED) + CODE},
        "prints-an-end": {"calc.py": said(f"{PASSED}+ : '>>>>> End Test Output'\n") + CODE},
        "prints-an-end-and-a-status": {
            "calc.py": said(f"{PASSED}\n>>>>> End Test Output\n>>>>> Test Exit Code: 0\n") + CODE
        },
        "leaves-at-import": {"calc.py": said(FAKED) + "os._exit(0)\n"},
        "cannot-be-imported": {"calc.py": said(FAKED) + "raise ValueError\n"},
        "prints-in-conftest": {"conftest.py": at_end},
        "hides-failures": {"conftest.py": at_end, "pytest.ini": "[pytest]\naddopts = --no-summary -q\n"},
        "deselects": {"conftest.py": without_odd + at_end},
        "brings-its-own-tests": {
            "tests/test_calc.py": TESTS + "\n\ndef test_halve_odd():\n    pass\n",
            "README": "x\n",
        },
    }
    return {name: diff(repo, changed) for name, changed in files.items()}


def said(text: str) -> str:
    """Code that prints past what pytest captures: to where its shell prints."""
    return f"import os\nopen(f'/proc/{{os.getppid()}}/fd/1', 'w').write({text!r})\n"


def made(repo: Path, files: Mapping[str, str]) -> str:
    """A git repository with one commit; its hash."""
    _write(repo, files)
    git(repo, "init", "-q", "-b", "main")
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "first")
    return git(repo, "rev-parse", "HEAD").strip()


def diff(repo: Path, files: Mapping[str, str]) -> str:
    """What writing these files changes; the repository is as before afterwards."""
    _write(repo, files)
    git(repo, "add", "-A")
    text = git(repo, "diff", "--cached", "--binary", "HEAD")
    git(repo, "reset", "-q", "--hard", "HEAD")
    return text


def git(repo: Path, *words: str) -> str:
    named = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "safe.directory=*"]
    done = subprocess.run(
        ["git", "-C", str(repo), *named, *words], capture_output=True, text=True, check=True
    )
    return done.stdout


def _write(repo: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        path = repo / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
