"""The examples of the manual: found in the pages, and a place where they can be typed as they stand."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from tests import harbor_tasks
from tests.command_runner import SOURCE, serving, until
from tests.forked_command import ForkedCommand, run_forked
from tests.image_builds import ImageScene, real_registry
from tests.registry_server import free_port
from tests.wait_bounds import stretch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("mytool", "claude", "codex", "mini", "opencode", "gemini", "aider")
PATIENCE = 180.0  # seconds for one command
SHELL_SYNTAX = frozenset("|&;<>$`*\n\\")  # a line without these, but in quotes, needs no shell: it is forked
# Placeholders of the pages, and values that stand here.
VALUES = {"SUITE": "tasks.jsonl", "AGENT": "bash", "MODEL": "gpt-5", "DIR": "runs/first"}
ROW = {"instruction": "Write 2 to out.txt", "grade": "grep -qx 2 out.txt", "solution": "echo 2 > out.txt"}
TASKS = "".join(json.dumps({"id": name, **ROW}) + "\n" for name in ("add-1", "django-1"))
MODEL = """
import asyncio
from holdwater.testing.scripted_model import ScriptedReply, serve_script

async def main():
    async with serve_script(lambda request: ScriptedReply(text="2\\n")) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
# A run to read from: two samples of two instances, one of which is tried twice and never passes.
MINE = """
import holdwater as hw

def instances():
    yield hw.Instance(id="add-1")
    yield hw.Instance(id="add-2")

async def grade(instance, sandbox, answer):
    return instance.id == "add-2"

async def talk(instance, sandbox, model):
    messages = [{"role": "user", "content": instance.id}]
    for _ in range(3):
        reply = await model.chat(messages)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on"}]
    await sandbox.write("out.txt", "2")

suite = hw.Suite(name="mine", instances=instances, grade=grade)
"""
# Top-level `await` and `async with`, as notebooks take them.
AWAITED = """
import ast, asyncio, inspect, sys
code = compile(sys.stdin.read(), "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
names = {"__name__": "__main__"}
found = eval(code, names)
if inspect.iscoroutine(found):
    asyncio.run(found)
"""


class Example(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Each line that is typed, and what the page says is printed then."""
        parts = re.split(r"(?m)^\$ ", self.text)[1:]
        return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


def examples(page: Path) -> list[Example]:
    text = page.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [Example(page, text[: m.start()].count("\n") + 2, m[1], m[2]) for m in found]


class Desk:
    """A directory with what the pages take for granted: tasks, a suite, a run, a model, programs on PATH."""

    def __init__(self, place: Path, url: str) -> None:
        self.place = place
        self.port = free_port()
        self.sandbox_port = free_port()
        self.protocol_port = free_port()
        self._servers: list[ForkedCommand] = []
        self.env = {
            **os.environ,
            "PYTHONPATH": f"{SOURCE}:{place}",
            "PATH": f"{place / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": "none",
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "PAGER": "cat",
            "SEARCH_TOKEN": "token-of-the-pages",
        }

    def furnish(self, *, run: bool) -> None:
        """Make the files; with `run`, also the run `runs/mine` to read from."""
        suite, solve = (
            next(e.text for e in examples(ROOT / "README.md") if e.language == "python" and word in e.text)
            for word in ("suite = hw.Suite", "def solve(")
        )
        files = {
            "tasks.jsonl": TASKS,
            "ids.txt": "# of `tasks.jsonl`\ndjango-1\n",
            "suite.py": f"{suite}\n{solve}",
            "mine.py": MINE,
        }
        for name, text in files.items():
            (self.place / name).write_text(text)
        scripts = dict.fromkeys(PROGRAMS, "exit 0")
        scripts["holdwater"] = f'exec {sys.executable} -m holdwater "$@"'
        for program, line in scripts.items():
            path = self.place / "bin" / program
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/bin/sh\n{line}\n")
            path.chmod(0o755)
        (self.place / "tools").mkdir()
        (self.place / "token").write_text("a token\n")
        (self.place / "token").chmod(0o600)
        for tree in ("terminal-bench", "terminal-bench-2"):
            harbor_tasks.task(self.place / tree / "one", '[environment]\ndocker_image = "debian:12"\n')
        if not run:
            return
        words = "holdwater run mine.py:suite --agent mine.py:talk --model gpt-5 --samples 2 --attempts 2"
        self.type(f"{words} --out runs/mine --quiet")

    def type(self, command: str, status: int = 0) -> str:
        """Run a line in this place; what it prints on stdout."""
        line = self.here(command)
        words = shlex.split(line, comments=True)
        if words[0] == "holdwater" and not SHELL_SYNTAX & set(re.sub(r"'[^']*'", "", line)):
            done = run_forked(*words[1:], seconds=PATIENCE, env=self.env, cwd=self.place)
        else:
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=self.place,
                env=self.env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=stretch(PATIENCE),
                check=False,
            )
        assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def serve(self, command: str, output: str) -> None:
        """Start a server in place of the one before; it says what the page says."""
        word, place = "serving: ", ["--listen", f"127.0.0.1:{self.port}"]
        if command.startswith("holdwater sandboxd "):
            word, place = "sandboxes: ", ["--listen", f"127.0.0.1:{self.sandbox_port}", "--out", "sandboxd"]
        elif "--protocol " in command:
            word, place = "clients; ", [*place, "--protocol-listen", f"127.0.0.1:{self.protocol_port}"]
        self.stop()
        path = self.place / "serving.txt"
        with path.open("wb") as told:
            words = [*shlex.split(self.here(command), comments=True)[1:], *place]
            self._servers.append(ForkedCommand(words, 1, told.fileno(), env=self.env, cwd=self.place))
        until("the server is there", lambda: word in path.read_text(), PATIENCE)
        assert self.here(output).strip().partition("...")[0] in path.read_text()

    def execute(self, code: str) -> None:
        """Run Python as it stands, with `await` allowed everywhere."""
        with TemporaryFile() as file:
            file.write(self.here(code).encode())
            file.seek(0)
            done = run_forked(
                *("-c", AWAITED),
                seconds=PATIENCE,
                stdin=file.fileno(),
                env=self.env,
                cwd=self.place,
                program=True,
            )
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"

    def here(self, text: str) -> str:
        """The text with the pages' placeholders and their port replaced."""
        for name, value in VALUES.items():
            text = re.sub(rf"\b{name}\b(?!/)", value, text)
        text = text.replace("127.0.0.1:8400", f"127.0.0.1:{self.port}")
        text = text.replace("127.0.0.1:8500", f"127.0.0.1:{self.sandbox_port}")
        text = text.replace("127.0.0.1:5000", f"127.0.0.1:{self.protocol_port}")
        return text.replace("AsyncClient()", f'AsyncClient("http://127.0.0.1:{self.port}")')

    def stop(self) -> None:
        for server in self._servers:
            server.send_signal(signal.SIGTERM)
        for server in self._servers:
            try:
                server.wait(stretch(60))
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        self._servers.clear()


@contextmanager
def furnished(place: Path, page: str = "") -> Iterator[Desk]:
    """A desk with what the text of a page names: a run, a registry with a recipe for it."""
    with ExitStack() as stack:
        url = stack.enter_context(serving("-c", textwrap.dedent(MODEL)))
        desk = Desk(place, url)
        stack.callback(desk.stop)
        if "holdwater images build" in page:
            port = stack.enter_context(real_registry(place / "registry"))
            scene = ImageScene(place, port)
            stack.callback(scene.close)
            scene.recipe(scene.bases(2))
        else:
            recipe = '[bases]\nimages = ["debian:12"]\n[target]\nrepository = "127.0.0.1:1/a"\n'
            (place / "images.toml").write_text(recipe)
        desk.furnish(run="runs/mine" in page or "latest" in page)
        yield desk
