"""The suite of `rollout_price.py`: an agent with two model calls and a command between, graded by a command.

Workers load it as `price_work.py:suite` and `price_work.py:look`. `look_plainly` runs the same two commands
without holdwater.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import holdwater as hw

FILES = {f"drawer/{name}": name.upper() for name in "abcd"} | {"key": "b"}
LOOK = 'cat "drawer/$D" 2>/dev/null || echo "?"'
CHECK = '[ -f answer ] && read -r found < answer && [ "$found" = B ] && echo right'


async def look(instance: hw.Instance, sandbox: Any, model: Any) -> str:
    messages: list[dict[str, Any]] = [{"role": "user", "content": instance.instruction}]
    asked = (await model.chat(messages))["choices"][0]["message"]
    found = (await sandbox.run(LOOK, env={"D": asked["content"]})).output.strip()
    messages += [asked, {"role": "user", "content": found}]
    await model.chat(messages)
    await sandbox.write("answer", f"{found}\n")
    return str(found)


async def grade(instance: hw.Instance, sandbox: Any, answer: object) -> bool:
    return str((await sandbox.run(CHECK)).output) == "right\n"


def look_plainly() -> bool:
    """Write the files, run the two commands as subprocesses of this process, and remove the directory."""
    with tempfile.TemporaryDirectory() as directory:
        for name, text in FILES.items():
            path = Path(directory, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        found = _run(LOOK, directory, {"D": "b"}).strip()
        Path(directory, "answer").write_text(f"{found}\n")
        return _run(CHECK, directory, {}) == "right\n"


def _run(line: str, directory: str, env: dict[str, str]) -> str:
    env = {"PATH": os.environ["PATH"], **env}
    done = subprocess.run(
        ["bash", "-c", line], cwd=directory, env=env, capture_output=True, text=True, check=False
    )
    return done.stdout


suite = hw.Suite(name="price", instances=lambda: (), grade=grade)
