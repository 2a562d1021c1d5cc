"""The commands in examples/README.md, typed as they stand."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from tests.forked_command import run_forked

from holdwater.testing.scripted_model import ScriptedReply, serve_script

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(
    r"`holdwater (run .*?)` \|$", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE
)


def load_example(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "examples" / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SHOPPER = load_example("browser/scripted_shopper.py")


def solving(request: dict[str, object]) -> ScriptedReply:
    """A model that knows the three tasks of `tasks.jsonl` by heart, and the shop of `browser/`."""
    if request.get("tools"):
        return SHOPPER.answer(request)  # type: ignore[no-any-return]
    asked = json.dumps(request["messages"])
    for line in (ROOT / "examples" / "tasks.jsonl").read_text().splitlines():
        row = json.loads(line)
        if json.dumps(row["instruction"])[1:-1][:60] in asked:
            return ScriptedReply(text=row["solution"])
    return ScriptedReply(text="false")


def type_in(line: str, out: Path, url: str) -> dict[str, object]:
    words = shlex.split(line.replace("$PWD", str(ROOT)))
    env = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
    process = run_forked(*words, "--out", str(out), "--json", "--quiet", cwd=ROOT, env=env)
    assert process.returncode == 0, process.stderr
    summary: dict[str, object] = json.loads(process.stdout)
    return summary


def test_the_readme_has_commands() -> None:
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("line", COMMANDS)
async def test_an_example_passes_as_it_is_typed(line: str, tmp_path: Path) -> None:
    if "browser" in line and shutil.which("chromium") is None:
        assert os.environ.get("CI") != "true"
        pytest.skip("`chromium` is not installed: `scripts/test-needs` does it")
    async with serve_script(solving) as url:
        summary = await asyncio.to_thread(type_in, line, tmp_path / "run", url)

    assert summary["outcomes"] == {"passed": summary["planned"]}
