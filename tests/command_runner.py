"""What the scenes share: the command as a process of its own, waits with deadlines, what a run left running.

A scene plays a whole run through the command and looks at what it leaves on disk and in `/proc`.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from tests.forked_command import OWN, ForkedCommand, Interpreter
from tests.wait_bounds import stretch

from holdwater.export.formats import export_run

SOURCE = Path(__file__).parents[1] / "src"
WORKER = "holdwater.rollout.worker"
MARK = "HOLDWATER_RUN"


class Command:
    """A `holdwater` command in a process group of its own; its output goes to files, so it never blocks.

    `interpreter`: it is `python -m holdwater`, not a fork of a process that has its modules.
    """

    def __init__(
        self,
        place: Path,
        *words: str,
        before: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        interpreter: bool = False,
        forks: Interpreter = OWN,
        network: str = "",
    ) -> None:
        place.mkdir(parents=True, exist_ok=True)
        number = len(list(place.glob("*.out")))
        self._out, self._err = place / f"{number:03d}.out", place / f"{number:03d}.err"
        self.words = words
        with self._out.open("wb") as out, self._err.open("wb") as err:
            variables = {**os.environ, "PYTHONPATH": str(SOURCE), **(env or {})}
            self._process: ForkedCommand | subprocess.Popen[bytes]
            if before or interpreter:
                self._process = subprocess.Popen(
                    [*before, sys.executable, "-m", "holdwater", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=variables,
                    start_new_session=True,
                )
            else:
                self._process = ForkedCommand(
                    words, out.fileno(), err.fileno(), env=variables, interpreter=forks, network=network
                )
        self.pid = self._process.pid

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float = 60.0) -> int:
        """Its exit status; a scene that takes longer than `seconds` of a quiet machine has failed."""
        bound = stretch(seconds)
        try:
            return self._process.wait(bound)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not over after {bound:g} s: {self}") from None

    def live_on(self, seconds: float) -> None:
        """Let it run for `seconds` more, or to its end."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    def signal(self, number: int) -> None:
        """Send a signal to the process group, as a terminal does."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        if self.running:
            self.signal(signal.SIGKILL)
        self._process.wait()

    def document(self) -> Any:
        """What stdout holds: exactly one JSON document."""
        return json.loads(self.stdout)

    def __repr__(self) -> str:
        return f"`holdwater {' '.join(self.words)}`\nstdout: {self.stdout}\nstderr: {self.stderr}"


class Scene:
    """A run directory, the suite file that it is about, and every command that was started on it."""

    def __init__(
        self,
        place: Path,
        before: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        interpreter: bool = False,
        forks: Interpreter = OWN,
        network: str = "",
    ) -> None:
        self.forks = forks  # the process that forks commands
        self.network = network  # the namespace that commands are in: a file such as `/proc/PID/ns/net`
        self.place = place
        self.before = before  # what commands are started with
        self.env = env
        self.interpreter = interpreter  # commands are not forked: their memory or `/proc` is looked at
        self.out = place / "run"
        self.file = place / "suite.py"
        self._commands: list[Command] = []

    def suite(self, source: str, **constants: Any) -> str:
        """Write a suite file that begins with `constants`; the spec of its `suite`."""
        lines = [f"{name} = {value!r}" for name, value in constants.items()]
        self.file.write_text("\n".join([*lines, textwrap.dedent(source)]))
        return f"{self.file}:suite"

    def agent(self, name: str = "solve") -> tuple[str, str]:
        return "--agent", f"{self.file}:{name}"

    def start(self, *words: str) -> Command:
        command = Command(
            self.place / "commands",
            *words,
            before=self.before,
            env=self.env,
            interpreter=self.interpreter,
            forks=self.forks,
            network=self.network,
        )
        self._commands.append(command)
        return command

    def run(self, *words: str) -> Command:
        return self.start("run", f"{self.file}:suite", "--out", str(self.out), "--json", *words)

    def resume(self) -> Command:
        return self.start("resume", str(self.out), "--json")

    def audit(self) -> dict[str, Any]:
        """What `audit --json` says."""
        command = self.start("audit", str(self.out), "--json")
        command.wait()
        found: dict[str, Any] = command.document()
        return found

    def export(self, what: str) -> list[dict[str, Any]]:
        """What `export --what` writes, without the cost of another process."""
        out = io.BytesIO()
        export_run(self.out, what, "jsonl", out)
        return [json.loads(line) for line in out.getvalue().splitlines()]

    def outcomes(self) -> dict[str, str]:
        """Instance -> how it ended."""
        return {row["instance"]: row["kind"] for row in self.export("outcomes")}

    @property
    def id(self) -> str:
        run: str = json.loads((self.out / "run.json").read_text())["id"]
        return run

    def processes(self) -> list[psutil.Process]:
        """Everything of this run that lives, but for the commands themselves: by what it carries."""
        return find_carriers(f"{MARK}={self.id}")

    def workers(self) -> list[psutil.Process]:
        return [p for p in self.processes() if WORKER in _line(p)]

    def scratch(self) -> list[str]:
        """The sandboxes' directories that are left."""
        place = self.out / "scratch"
        return [entry.name for entry in place.glob("holdwater-*/*") if entry.name != ".holdwater"]

    def assert_clean(self) -> None:
        """Nothing of the run is left: no process, no sandbox, no socket."""
        assert [_line(p) for p in self.processes()] == []
        assert list((self.out / "scratch").iterdir()) == []
        assert list(Path(os.environ.get("TMPDIR", "/tmp")).glob(f"holdwater-{self.id}-*")) == []

    def assert_whole(self, planned: int, dropped: int = 0) -> None:
        """Every instance is settled, once; of so many attempts the files are not kept."""
        found = self.audit()
        expected = {"planned": planned, "settled": planned, "lost": 0, "duplicated": 0, "corrupt": 0}
        sound = {"ok": True, "problems": [], "unfinished": 0, "notes": []}
        assert found == {**expected, **sound, "dropped": dropped}

    def close(self) -> None:
        """End whatever a failed scene left."""
        for command in self._commands:
            command.kill()
        if (self.out / "run.json").exists():
            for process in self.processes():
                _end(process)


@contextmanager
def serving(*words: str) -> Iterator[str]:
    """A model in a Python process of its own, which outlives what is killed; the URL that it prints."""
    ours, theirs = os.pipe()
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with os.fdopen(ours) as told:
        try:
            process = ForkedCommand(words, theirs, 2, env=env, program=True)
        finally:
            os.close(theirs)
        try:
            yield told.readline().strip()
        finally:
            process.kill()
            process.wait()


def until(what: str, true: Callable[[], Any], seconds: float = 30.0, every: float = 0.02) -> None:
    """Wait until `true()`; a scene that takes longer than `seconds` of a quiet machine has failed."""
    bound = stretch(seconds)
    end = time.monotonic() + bound
    while not true():
        assert time.monotonic() < end, f"waited for {bound:g} s: {what}"
        time.sleep(every)


def lines(path: Path) -> list[str]:
    """The whole lines of a trace file, which may not be there yet."""
    text = path.read_text() if path.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def hears(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM: Python itself has none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) & 1 << signal.SIGTERM - 1)


def find_carriers(mark: str) -> list[psutil.Process]:
    """The living processes with this variable in their environment; quick, as each scene looks for them."""
    found = []
    with os.scandir("/proc") as entries:
        pids = [entry.name for entry in entries if entry.name.isdigit()]
    for pid in pids:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
                environ = file.read()  # empty for a zombie
            if mark.encode() in environ.split(b"\0") and int(pid) != os.getpid():
                found.append(psutil.Process(int(pid)))
        except (OSError, psutil.Error):
            continue
    return found


def _line(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.Error:
        return str(process.pid)


def _end(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        pass  # it is gone
