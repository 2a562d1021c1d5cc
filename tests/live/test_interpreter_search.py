"""The Python of a layer: the running one, one of pyenv, one of uv, or an error that says how to get one."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
from tests.layer_projects import required

from holdwater.core.errors import BadInput
from holdwater.image.layer.interpreter import PythonInterpreter
from holdwater.image.layer.interpreter_search import find_interpreter
from holdwater.image.layer.program import ProgramRunner

RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHER = "3.13" if RUNNING != "3.13" else "3.12"


@pytest.fixture
def programs(tmp_path: Path) -> ProgramRunner:
    return ProgramRunner(tmp_path / "log", tmp_path, keep=[], env={})


@pytest.fixture
async def other(programs: ProgramRunner) -> PythonInterpreter:
    """An interpreter of this machine that is not the running one."""
    return await find_interpreter(programs, OTHER)


async def test_without_a_version_it_is_the_running_one(programs: ProgramRunner) -> None:
    found = await find_interpreter(programs)

    assert found.version == sys.version_info[:3]
    assert found.executable == Path(sys.executable).resolve()
    assert await find_interpreter(programs, RUNNING) == found


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without another version than the running one; return the directory of uv's Pythons."""
    required("uv")
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return tmp_path / "uv"


async def test_an_interpreter_of_uv_s_own_is_found(
    other: PythonInterpreter, bare: Path, programs: ProgramRunner
) -> None:
    own = bare / f"cpython-{write_version(other)}-linux-x86_64-gnu"
    copy_python(other, own)

    found = await find_interpreter(programs, OTHER)

    assert (found.version, found.stdlib) == (other.version, own / "lib" / other.stdlib.name)


async def test_uv_installs_a_missing_version(
    other: PythonInterpreter, bare: Path, programs: ProgramRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a list of downloads that names an archive on this machine."""
    copy_python(other, bare.parent / "python")
    archive = shutil.make_archive(str(bare.parent / "python"), "tar", bare.parent, "python")
    major, minor, patch = other.version
    download = {
        **{"name": "cpython", "os": "linux", "libc": "gnu", "arch": {"family": "x86_64", "variant": None}},
        **{"major": major, "minor": minor, "patch": patch, "prerelease": "", "variant": None},
        **{"url": f"file://{archive}", "sha256": None, "build": "20241016"},
    }
    listed = {f"cpython-{write_version(other)}-linux-x86_64-gnu": download}
    (bare.parent / "downloads.json").write_bytes(msgspec.json.encode(listed))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", str(bare.parent / "downloads.json"))

    found = await find_interpreter(programs, OTHER)

    assert found.version == other.version
    assert found.executable.is_relative_to(bare)


async def test_a_version_that_exists_nowhere_is_an_error_with_the_reason(programs: ProgramRunner) -> None:
    required("uv")

    with pytest.raises(
        BadInput, match=r"no Python 3\.99 on this machine, and uv cannot install one"
    ) as raised:
        await find_interpreter(programs, "3.99")

    assert "uv python install 3.99" in raised.value.hint


async def test_without_uv_the_error_says_how_to_get_one(
    programs: ProgramRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    with pytest.raises(BadInput, match=r"no Python 3\.99 on this machine$"):
        await find_interpreter(programs, "3.99")


def write_version(interpreter: PythonInterpreter) -> str:
    return ".".join(map(str, interpreter.version))


def copy_python(interpreter: PythonInterpreter, copy: Path) -> None:
    """Copy an interpreter with its library, with links to the files where the file system has them."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:
            shutil.copy2(source, target, follow_symlinks=False)

    skipped = shutil.ignore_patterns("test", "site-packages", "__pycache__", "config-*", "*.a", "share")
    prefix = interpreter.executable.parents[1]
    shutil.copytree(prefix, copy, symlinks=True, ignore=skipped, copy_function=link)
