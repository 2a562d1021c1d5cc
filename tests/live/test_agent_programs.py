"""Programs of agents in odd places: a sandbox shows what each needs to start, and nothing beside it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdwater.agent.command import find_paths, find_program_files
from holdwater.core.config import SandboxRoot
from holdwater.core.errors import BadInput, SandboxFailed
from holdwater.core.records import CommandResult, Limits, Network
from holdwater.sandbox.probe import SYSTEM_PATH, probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes, check_directories, find_visible

pytestmark = pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true",
    reason=f"bubblewrap does not work here: {probe().why_not}",
)
READ_PACKAGE = '#!/bin/sh\ncat "$(dirname "$(readlink -f "$0")")/../dep/data"\n'


@pytest.fixture(params=["home", "temporary"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A made-up home with a secret in it; one lies below `/tmp`, which sandboxes replace."""
    if request.param == "temporary":
        place = tmp_path / "home"
    else:
        place = Path("/var/lib" if os.geteuid() == 0 else Path.home(), f"holdwater-programs-{os.getpid()}")
    write(place / ".env", "hunter2")
    yield place
    shutil.rmtree(place)


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)
    return path


async def run_shown(home: Path, program: str, *words: str, search: Path | None = None) -> CommandResult:
    """Run a program with what it needs, and prove that its home stays unseen."""
    path = f"{search}:{SYSTEM_PATH}" if search else SYSTEM_PATH
    found = shutil.which(program, path=path) or program
    needed = find_program_files([found, *find_paths(found, *words)], path)
    visible = find_visible(SandboxRoot.SYSTEM, (), needed.trees, needed.links)
    boxes = ProcessSandboxes(home / "scratch", f"run-{os.getpid()}", Network.NONE, path=path, visible=visible)
    async with boxes.open(1, Limits(), None) as box:
        seen = await box.run(f"cat {home}/.env; find {home} -name .env")
        assert seen.stdout == ""
        return await box.run([program, *words])


async def test_a_named_file_is_shown_alone(home: Path) -> None:
    program = write(home / "project" / "agent.py", "#!/usr/bin/env python3\nprint('it ran')")
    write(home / "project" / "neighbour.py", "x = 1")

    result = await run_shown(home, str(program))
    listed = await run_shown(home, "sh", "-c", f"ls -A {program.parent}", str(program), str(program.parent))
    by_interpreter = await run_shown(home, "python3", str(program))

    assert (result.stdout, by_interpreter.stdout) == ("it ran\n", "it ran\n"), result
    assert listed.stdout == "agent.py\n"


async def test_a_package_of_npm_comes_with_its_neighbours(home: Path) -> None:
    prefix = home / ".npm-global"
    write(prefix / "lib/node_modules/tool/cli.js", READ_PACKAGE)
    write(prefix / "lib/node_modules/dep/data", "of another package")
    (prefix / "bin").mkdir()
    (prefix / "bin/tool").symlink_to("../lib/node_modules/tool/cli.js")

    result = await run_shown(home, "tool", search=prefix / "bin")

    assert result.stdout == "of another package", result


async def test_links_of_directories_lead_where_they_did(home: Path) -> None:
    share = home / ".local/share/tool"
    write(share / "versions/2.1/tool", "#!/bin/sh\necho version 2.1")
    (share / "current").symlink_to("versions/2.1")
    (home / ".local/bin").mkdir()
    (home / ".local/bin/tool").symlink_to(share / "current" / "tool")

    result = await run_shown(home, "tool", search=home / ".local/bin")

    assert result.stdout == "version 2.1\n", result


async def test_a_virtual_environment_comes_with_its_packages_and_its_interpreter(home: Path) -> None:
    tool = home / ".local/share/uv/tools/tool"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(os.path.realpath(sys.executable))
    write(tool / "pyvenv.cfg", f"home = {base.parent}\n")
    write(tool / "lib" / version / "site-packages" / "module.py", "print('imported')")
    write(tool / "bin/tool", f"#!{tool}/bin/python\nimport module\n")
    (tool / "bin/python").symlink_to(base)
    (home / ".local/bin").mkdir(parents=True)
    (home / ".local/bin/tool").symlink_to(tool / "bin/tool")

    result = await run_shown(home, "tool", search=home / ".local/bin")

    assert result.stdout == "imported\n", result


async def test_a_shim_comes_with_what_it_hands_on_to(home: Path) -> None:
    root = home / ".pyenv"
    write(root / "libexec/pyenv", "#!/bin/sh\necho handed on")
    write(root / "shims/tool", f"#!/bin/sh\nexec {root}/libexec/pyenv\n")

    result = await run_shown(home, "tool", search=root / "shims")

    assert result.stdout == "handed on\n", result


async def test_a_program_that_is_not_shown_is_named_with_its_place(home: Path) -> None:
    write(home / "bin/other", "#!/bin/sh\n")
    boxes = ProcessSandboxes(
        home / "scratch", f"run-{os.getpid()}", Network.NONE, path=f"{home}/bin:{SYSTEM_PATH}"
    )

    async with boxes.open(1, Limits(), None) as box:
        with pytest.raises(SandboxFailed, match="no such program in the sandbox: `other`") as raised:
            await box.run(["other"])

    assert raised.value.hint.startswith(f"sandboxes do not show `{home}/bin/other`: add `--mount ")


def test_a_directory_that_a_command_names_has_to_be_mounted(home: Path) -> None:
    named = [str(home)]

    with pytest.raises(BadInput, match="do not see a directory") as raised:
        check_directories(named, SandboxRoot.SYSTEM, (), probe())

    assert raised.value.hint == f"add `--mount {home}:{home}`"
    check_directories(named, SandboxRoot.SYSTEM, ((str(home), str(home)),), probe())
    check_directories(["/", "/tmp", "/usr/lib", "/etc"], SandboxRoot.SYSTEM, (), probe())


def test_programs_in_a_line_of_shell_are_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = write(home / "bin/tool", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{home}/bin:{SYSTEM_PATH}")

    found = find_paths("sh", "-c", f"cd {home}; cat /etc/hosts|KEY=x tool --flag 'a b' && missing")

    assert {Path(path).name for path in found} == {"sh", "cat", "hosts", "tool"}
    assert str(tool) in found
