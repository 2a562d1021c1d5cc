"""An agent that looks for what a process sandbox must not show: secrets, suites, other runs, host sockets.

Each attack goes through the command, as root and as an ordinary user. A control with `--sandbox-root host`
shows that the agent finds what there is.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from tests.command_runner import SOURCE
from tests.wait_bounds import stretch

from holdwater.core.records import Limits, Network, SandboxSpec
from holdwater.sandbox.probe import probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes, VisibilitySpec

pytestmark = pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true",
    reason=f"bubblewrap does not work here: {probe().why_not}",
)

CREDENTIALS = (
    *(
        ".ssh/id_ed25519",
        ".aws/credentials",
        ".config/gcloud/credentials.db",
        ".netrc",
        ".docker/config.json",
    ),
    *(".kube/config", ".gnupg/private-keys-v1.d/key", ".git-credentials", ".claude/.credentials.json"),
    *(".claude.json", ".codex/auth.json", ".gemini/oauth_creds.json", ".local/share/opencode/auth.json"),
    *(".aider.conf.yml", ".config/mini-swe-agent/.env", ".config/gh/hosts.yml", ".npmrc", ".pypirc"),
    *(".cache/huggingface/token", ".huggingface/token", ".azure/msal_token_cache.json", ".vault-token"),
    *(".cargo/credentials.toml", ".config/hub", ".pgpass", ".my.cnf", ".s3cfg", ".boto", ".terraformrc"),
    *(".config/op/config", ".password-store/key.gpg", ".mozilla/logins.json", ".bash_history"),
    *(".python_history", ".config/rclone/rclone.conf", ".env"),
)
PROJECT = (".env", "tasks.jsonl", "keys.txt", "attack.py", "runs/other/ledger.db", "runs/other/run.json")
SOCKETS = ("home/.ssh-agent.sock", "project/door.sock", "project/runs/control.sock", "state/database.sock")
RUN = ("run", "tasks.jsonl", "--agent", "attack.py:attack", "--out", "runs/this", "--workers", "1", "--quiet")
PROBE = """
import glob, json, os, socket, sys

targets, found = json.loads(sys.argv[1]), []
ways = ["", "/oldroot", "/newroot", "/proc/1/root", "/proc/self/cwd/../../..", "/run/holdwater/work/../../.."]
for path in targets["files"]:
    for way in ways:
        try:
            if os.path.isdir(way + path):
                assert os.listdir(way + path)
            else:
                assert open(way + path, "rb").read()
        except (OSError, AssertionError):
            continue
        found.append(way + path)
for path in targets["sockets"]:
    for way in ways:
        with socket.socket(socket.AF_UNIX) as one:
            try:
                one.connect(way + path)
            except OSError:
                continue
            found.append(way + path)
print(json.dumps(found))
"""
ATTACK = """
import json
from pathlib import Path

HERE = Path(__file__).parent


async def attack(instance, sandbox, model):
    targets = (HERE / "targets.json").read_text()
    probe = (HERE / "probe.txt").read_text()
    result = await sandbox.run(["/usr/bin/python3", "-c", probe, targets])
    (HERE / "report").write_text(result.stdout or result.stderr)
"""


class House:
    """A made-up home, a project in it and services that listen, all of which belong to one user."""

    def __init__(self, place: Path, user: int) -> None:
        self.place = place
        self.project = place / "project"
        self._user = user
        for name in [*(f"home/{name}" for name in CREDENTIALS), *(f"project/{name}" for name in PROJECT)]:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text("hunter2")
        (place / "state").mkdir()
        task = {"id": "one", "grade": "true", "solution": "echo hunter2"}
        (self.project / "tasks.jsonl").write_text(json.dumps(task))
        (self.project / "attack.py").write_text(ATTACK)
        (self.project / "probe.txt").write_text(PROBE)
        (self.project / "targets.json").write_text(json.dumps({"files": self.files, "sockets": self.sockets}))
        for path in [place, *place.rglob("*")]:
            os.chown(path, user, user)

    @property
    def files(self) -> list[str]:
        own = [f"{self.place}/home/{name}" for name in CREDENTIALS]
        own += [f"{self.project}/{name}" for name in PROJECT]
        own += [f"{self.project}/runs/this/{name}" for name in ("run.json", "ledger.db", "scratch")]
        return [*own, "/etc/shadow", "/etc/gshadow", str(SOURCE / "holdwater/suite/demo/tasks")]

    @property
    def sockets(self) -> list[str]:
        return [f"{self.place}/{name}" for name in SOCKETS]

    def listen(self, stack: ExitStack) -> None:
        for path in self.sockets:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(path)
            listener.listen()
            Path(path).chmod(0o777)

    def run(self, *words: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Attack once; how the command ended, and what the agent found."""
        packages = Path(msgspec.__file__).parents[1]
        other = (
            {} if self._user == os.getuid() else {"user": self._user, "group": self._user, "extra_groups": []}
        )
        done = subprocess.run(
            [*_interpreter(self._user), "-m", "holdwater", *RUN, *words],
            cwd=self.project,
            env={
                "PATH": os.environ["PATH"],
                "HOME": f"{self.place}/home",
                "PYTHONPATH": f"{SOURCE}:{packages}",
            },
            capture_output=True,
            text=True,
            timeout=stretch(120),
            **other,
        )  # type: ignore[call-overload]
        report = self.project / "report"
        assert report.exists(), done
        return done, json.loads(report.read_text())


def _interpreter(user: int) -> list[str]:
    """A Python that this user may run; the one that runs the tests may lie in a home that is closed to it."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for program in (sys.executable, f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):
        try:
            subprocess.run([program, "-c", ""], user=user, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return [program]
    pytest.skip(f"no Python {version} that another user may run")


@pytest.fixture(params=["root", "ordinary"])
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("only root is root")
    user = os.getuid() if request.param == "root" or os.geteuid() else 50_000 + os.getpid() % 10_000
    place = Path("/var/lib" if os.geteuid() == 0 else Path.home(), f"holdwater-escape-{os.getpid()}")
    place.mkdir()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, place)
        house = House(place, user)
        house.listen(stack)
        yield house


def test_an_agent_finds_no_secret_suite_other_run_or_socket(house: House) -> None:
    done, found = house.run()

    assert (done.returncode, found) == (0, []), done
    assert "--sandbox-root" not in done.stderr


def test_the_hosts_root_shows_them_and_the_run_says_so(house: House) -> None:
    done, found = house.run("--sandbox-root", "host")

    shown = {path for path in found if path in house.files or path in house.sockets}
    assert done.returncode == 0, done
    assert "note: `--sandbox-root host`" in done.stderr
    assert {f"{house.project}/.env", f"{house.project}/tasks.jsonl", *house.sockets} <= shown
    assert not any("/runs/this/" in path for path in found)


def test_a_mounted_directory_shows_what_was_asked_for_and_nothing_beside_it(house: House) -> None:
    (house.project / "shown").mkdir()
    (house.project / "shown" / "file").write_text("shown")
    targets = {"files": ["/opt/shown/file", *house.files], "sockets": house.sockets}
    (house.project / "targets.json").write_text(json.dumps(targets))

    done, found = house.run("--mount", "shown:/opt/shown")

    assert done.returncode == 0, done
    assert {path.removeprefix("/proc/1/root") for path in found} <= {"/opt/shown/file"} | {
        path for path in found if path.endswith("/opt/shown/file")
    }
    assert "/opt/shown/file" in found


async def test_a_run_below_a_mount_is_hidden_at_its_other_path(tmp_path: Path) -> None:
    run = tmp_path / "project" / "runs" / "one"
    (run / "scratch").mkdir(parents=True)
    (run / "ledger.db").write_text("truth")
    (tmp_path / "project" / "file").write_text("shown")
    visible = VisibilitySpec(mounts=((str(tmp_path / "project"), "/opt/project"),))
    boxes = ProcessSandboxes(
        run / "scratch", f"run-{os.getpid()}", Network.NONE, hide=(run,), visible=visible
    )

    async with boxes.open(1, Limits(), None) as box:
        result = await box.run("cat /opt/project/file; find /opt/project/runs -type f")

    assert (result.stdout, result.stderr) == ("shown", "")


@pytest.mark.parametrize("directory", ["/tmp/a/b", "/app/a/b"])
async def test_a_planted_link_does_not_lead_the_next_command_to_the_host(
    tmp_path: Path, directory: str
) -> None:
    """Bubblewrap makes the directories on the way to a mount: a link among them must not lead it out."""
    host, above = tmp_path / "host", Path(directory).parent
    host.mkdir()
    start = SandboxSpec(workdir="/app", directories=(directory,))
    boxes = ProcessSandboxes(tmp_path / "scratch", f"run-{os.getpid()}", Network.NONE)

    async with boxes.open(1, Limits(), None, start) as box:
        await box.run(f"mv {above} {above.parent}/moved; ln -s /oldroot{host} {above}")
        result = await box.run(f"touch {directory}/file && echo made")

    assert list(host.iterdir()) == []
    assert result.stdout == "made\n"
