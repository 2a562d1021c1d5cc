"""The conductor as a container plays its pod: SIGTERM drains it within the grace, and the next one resumes.

The image is `deploy/Dockerfile` on the tests' own Debian, built without a network.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.command_runner import until
from tests.container_runs import IMAGE, Ground
from tests.docker_daemon import needed
from tests.wait_bounds import stretch

import holdwater as hw

ROOT = Path(__file__).parents[2]
BASE, NAME = "holdwater-base:test", "holdwater:test"
USER, ROOT_USER = ("--user", "10001:10001"), ("--user", "0:0")
# As `allowPrivilegeEscalation: false` and `capabilities: { drop: [ALL] }` of a pod, and its other parts.
DROPPED = ("--cap-drop", "ALL", "--security-opt", "no-new-privileges")
SECCOMP, UNMASKED = ("--security-opt", "seccomp=unconfined"), ("--security-opt", "systempaths=unconfined")
NAMESPACES = (*SECCOMP, *UNMASKED)
READ_ONLY = ("--read-only", "--tmpfs", "/tmp", "--tmpfs", "/work:mode=1777")
POD = (*USER, *DROPPED)


def find_privileges() -> tuple[str, ...]:
    """Return the options of a privileged container; where root lacks capabilities itself, all but these."""
    status = Path("/proc/self/status").read_text()
    bounding = int(re.findall(r"CapBnd:\s*(\w+)", status)[0], 16)
    lacking = [name for number, name in CAPABILITIES.items() if not bounding >> number & 1]
    if not lacking:
        return ("--privileged",)
    dropped = [word for name in lacking for word in ("--cap-drop", name)]
    return ("--cap-add", "ALL", *dropped, *NAMESPACES, "--volume", "/sys/fs/cgroup:/sys/fs/cgroup")


class SecurityContext(NamedTuple):
    """A security context of a pod as options of docker, and the sandboxes that it allows."""

    options: tuple[str, ...]
    isolated: bool = False
    grouped: bool = False


CAPABILITIES = {12: "NET_ADMIN", 16: "SYS_MODULE", 19: "SYS_PTRACE", 21: "SYS_ADMIN", 24: "SYS_RESOURCE"}
CONTEXTS = {
    "restricted": SecurityContext(POD),
    "restricted root": SecurityContext((*ROOT_USER, *DROPPED)),
    "restricted read-only": SecurityContext((*POD, *READ_ONLY)),
    "default root": SecurityContext(ROOT_USER),
    "seccomp alone": SecurityContext((*POD, *SECCOMP)),
    "unmasked alone": SecurityContext((*POD, *UNMASKED)),
    "namespaces": SecurityContext((*POD, *NAMESPACES), isolated=True),
    "namespaces root": SecurityContext((*ROOT_USER, *DROPPED, *NAMESPACES)),
    "namespaces read-only": SecurityContext((*POD, *NAMESPACES, *READ_ONLY), isolated=True),
    "privileged": SecurityContext(("--privileged", *USER), isolated=True),
    "privileged root": SecurityContext((*find_privileges(), *ROOT_USER), isolated=True, grouped=True),
    "privileged read-only": SecurityContext(
        (*find_privileges(), *ROOT_USER, *READ_ONLY), isolated=True, grouped=True
    ),
}
TASKS = "".join(
    json.dumps({"id": f"t{n}", "instruction": "x", "grade": "grep -q ok done.txt"}) + "\n" for n in range(4)
)
RUN = (
    *("run", "/runs/tasks.jsonl", "--agent", "command", "--command", "sh -c 'sleep 4; echo ok > done.txt'"),
    *("--out", "/runs/run", "--workers", "1", "--concurrency", "2", "--quiet", "--json"),
)
pytestmark = pytest.mark.proof


def do(*words: str, place: Path) -> None:
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=stretch(240), check=False)
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])


@pytest.fixture(scope="module")
def image(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    needed("apt-get")
    place = tmp_path_factory.mktemp("image")
    pip = (str(Path(sys.base_prefix, "bin", "python3")), "-m", "pip", "--disable-pip-version-check")
    binary = ("--only-binary", ":all:", "--python-version", "3.11", "--dest", "wheels")
    do(*pip, "download", "--quiet", *binary, "-r", str(ROOT / "requirements/run.txt"), place=place)
    do(*pip, "download", "--quiet", *binary, "pip", place=place)
    do(
        str(ROOT / ".venv/bin/uv"),
        "build",
        "--quiet",
        "--wheel",
        "--out-dir",
        str(place / "wheels"),
        place=ROOT,
    )
    do("apt-get", "download", "bubblewrap", place=place)
    next(place.glob("bubblewrap_*.deb")).rename(place / "bubblewrap.deb")
    lines = (f"FROM {IMAGE}", "COPY bubblewrap.deb /", "RUN dpkg --install /bubblewrap.deb")
    (place / "Dockerfile").write_text("\n".join(lines) + "\n")
    build = ("build", "--quiet", "--network", "none")
    ground.docker(*build, "--tag", BASE, str(place))
    arguments = ("--build-arg", f"BASE={BASE}", "--build-arg", "PACKAGES=")
    ground.docker(*build, *arguments, "--file", str(ROOT / "deploy/Dockerfile"), "--tag", NAME, str(place))
    yield NAME
    ground.docker("rmi", "--force", NAME, BASE)
    shutil.rmtree(place)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """The volume of the pods, which belongs to their group as `fsGroup` makes it."""
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o777)
    runs.chmod(0o777)
    (runs / "tasks.jsonl").write_text(TASKS)
    return runs


class Pod:
    """One container after the other with the same volume."""

    def __init__(self, ground: Ground, volume: Path, options: tuple[str, ...] = POD) -> None:
        self._ground = ground
        self._options = (*options, "--network", "none", "--volume", f"{volume}:/runs", "--memory", "1g")
        self._name = f"pod-{volume.parent.name[-30:]}"

    def run(self, *words: str) -> tuple[int, str, str]:
        """Run a command to its end; its status and output."""
        self.start(*words)
        return self.finish()

    def start(self, *words: str) -> None:
        self._ground.docker("run", "--detach", "--name", self._name, *self._options, NAME, *words)

    def signal(self, *words: str) -> None:
        self._ground.docker(*words, self._name)

    def finish(self) -> tuple[int, str, str]:
        status = int(self._ground.docker("wait", self._name))
        logs = self._ground.logs(self._name)
        self._ground.docker("rm", "--volumes", self._name)
        return (status, *logs)


def until_acting(volume: Path) -> None:
    until("two sandboxes are open", lambda: len(list(volume.glob("run/scratch/holdwater-*/[0-9]*"))) == 2, 60)


def test_the_demo_runs_in_the_image_without_privileges(image: str, ground: Ground, volume: Path) -> None:
    status, out, err = Pod(ground, volume).run("run", "demo", "--out", "/runs/run", "--json", "--quiet")

    assert status == 0, err
    summary = json.loads(out)
    assert summary["outcomes"] == {"passed": 14, "failed": 1}
    assert "sandboxes are not isolated, because bubblewrap is not used" in err
    assert summary["gauge"]["memory_limit"] == 1 << 30


def test_sigterm_drains_a_pod_within_the_grace_and_the_next_resumes(
    image: str, ground: Ground, volume: Path
) -> None:
    pod = Pod(ground, volume)
    pod.start(*RUN, "--grace", "30")
    until_acting(volume)

    pod.signal("stop", "--time", "60")
    status, out, _ = pod.finish()
    assert status == 3
    assert json.loads(out)["outcomes"] == {"passed": 2}  # what was running finished

    _assert_resumed(pod, volume)


def test_a_pod_whose_grace_is_over_leaves_a_run_that_resumes(
    image: str, ground: Ground, volume: Path
) -> None:
    pod = Pod(ground, volume)
    pod.start(*RUN, "--grace", "0.2")
    until_acting(volume)

    pod.signal("stop", "--time", "60")
    assert pod.finish()[0] == 3

    _assert_resumed(pod, volume)


def test_a_pod_that_is_killed_leaves_a_run_that_resumes(image: str, ground: Ground, volume: Path) -> None:
    pod = Pod(ground, volume)
    pod.start(*RUN)
    until_acting(volume)

    pod.signal("kill")
    assert pod.finish()[0] == 137

    _assert_resumed(pod, volume)


def test_bubblewrap_works_with_the_security_context_of_the_manifest(
    image: str, ground: Ground, volume: Path
) -> None:
    status, out, err = Pod(ground, volume, (*POD, *NAMESPACES)).run(*RUN)

    assert status == 0, err
    assert json.loads(out)["outcomes"] == {"passed": 4}
    assert "not isolated" not in err


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_security_context_decides_how_sandboxes_are_isolated(
    image: str, ground: Ground, volume: Path, name: str
) -> None:
    context = CONTEXTS[name]
    (volume / "tasks.jsonl").write_text(TASKS.splitlines()[0] + "\n")

    _, out, _ = Pod(ground, volume, context.options).run("doctor", "--json")
    status, _, err = Pod(ground, volume, context.options).run(*RUN, "--sandbox-memory", "64MiB")

    found = {row["what"]: row["value"] for row in json.loads(out)["findings"]}
    assert found["bubblewrap"].endswith("works") == context.isolated, found
    assert (found["sandbox memory"] == "enforced by a control group") == context.grouped, found
    assert status == 0, err
    assert ("sandboxes are not isolated" in err) != context.isolated


def _assert_resumed(pod: Pod, volume: Path) -> None:
    status, out, err = pod.run("resume", "/runs/run", "--json", "--quiet")
    assert status == 0, err
    summary: dict[str, Any] = json.loads(out)
    assert summary["outcomes"] == {"passed": 4}
    audit = hw.audit(volume / "run")
    assert audit.ok and audit.planned == audit.settled == 4
    assert list(volume.glob("run/scratch/*")) == []
