"""Measures the memory that each preset uses in its sandbox for one short conversation.

    python benchmarks/preset_memory.py [--quick] [--json] [--rows claude-code,codex] [--path DIRECTORY]

The programs are those on PATH, or in the directory that `--path` names. It measures; it asserts nothing.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import table
from table import Row, say

import holdwater as hw
from holdwater.agent.presets import PRESETS
from holdwater.core.records import Verdict
from holdwater.testing.scripted_model import ScriptedReply, serve_script

INSTALLED = Path(__file__).parents[1] / ".clients/bin"
LAST_COMMAND = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # how mini-swe-agent ends
ENDS: dict[str, dict[str, Any]] = {
    "mini-swe-agent": {"name": "bash", "arguments": {"command": LAST_COMMAND}},
    "openhands": {"name": "finish", "arguments": {"message": "done"}},
}


def main() -> None:
    parser = table.parser(__doc__ or "")
    parser.add_argument("--path", type=Path, default=INSTALLED, help="where the programs are")
    options = parser.parse_args()
    os.environ["PATH"] = f"{options.path}:{os.environ['PATH']}"
    os.environ["OPENAI_API_KEY"] = "sk-none"
    names = options.rows.split(",") if options.rows else list(PRESETS)
    rows: list[Row] = []
    for name in names[:1] if options.quick else names:
        say(name)
        with tempfile.TemporaryDirectory() as directory:
            peak = asyncio.run(play(Path(directory) / "run", name))
        rows.append(Row(f"{name}: most memory in its sandbox", round(peak / 2**20), "MiB"))
        rows.append(Row(f"{name}: declared", PRESETS[name].memory >> 20, "MiB"))
    table.show(rows, json=options.json)


async def play(out: Path, name: str) -> int:
    """Run one attempt; return the peak of its sandbox."""

    def instances() -> Iterator[hw.Instance]:
        yield hw.Instance(id="one", instruction="Say that it is done.")

    def grade(instance: hw.Instance, sandbox: hw.Sandbox, answer: str | None) -> bool:
        return True

    def reply(request: dict[str, Any]) -> ScriptedReply:
        end = ENDS.get(name)
        return ScriptedReply(tool_calls=[{**end, "id": "call_1"}] if end else (), text="done")

    verdicts: list[Verdict] = []
    suite = hw.Suite(name="memory", instances=instances, grade=grade)
    async with serve_script(reply) as url:
        terms: dict[str, Any] = {"model": "test-model", "base_url": url, "retries": 0, "timeout": 600}
        await hw.arun(suite, name, out=out, workers=0, observers=[verdicts.append], **terms)
    return verdicts[0].peak_memory


if __name__ == "__main__":
    main()
