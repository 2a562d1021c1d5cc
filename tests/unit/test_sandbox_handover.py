"""What launchers get by descriptors."""

from __future__ import annotations

import os
import subprocess

import pytest
from tests.wait_bounds import stretch

from holdwater.core.records import Limits
from holdwater.sandbox.launcher import (
    ENTRY_FAILED,
    DescriptorHandover,
    build_bwrap_argv,
    build_launcher,
    render_setenv,
    render_settings,
)

VARIABLES = {
    "PATH": "/usr/bin:/bin",
    "QUOTES": 'it\'s "$HOME" `id`\n\\',
    "odd.name": "a b",
    "-n": "dash",
    "PPID": "1",
    "BYTES": "\udc81\udcff",
    "IFS": "x",
    "CDPATH": "/usr",
}


def enter(variables: dict[str, str], workdir: str) -> subprocess.CompletedProcess[bytes]:
    """`env -0` through the entrance as it is without bubblewrap."""
    handover = DescriptorHandover()
    try:
        stdin = handover.put(render_settings(variables, workdir))
        words = [*build_launcher(None, Limits(), root=True, sources=True), "env", "-0"]
        return subprocess.run(words, stdin=stdin, capture_output=True, env={}, cwd="/", timeout=stretch(60))
    finally:
        handover.close()


def test_the_entrance_hands_variables_on_as_they_are() -> None:
    done = enter(VARIABLES, "/usr")

    found = dict(row.split(b"=", 1) for row in done.stdout.split(b"\0") if row)
    assert {name: found.get(os.fsencode(name)) for name in VARIABLES} == {
        name: os.fsencode(value) for name, value in VARIABLES.items()
    }, done.stderr
    assert set(found) - {os.fsencode(name) for name in VARIABLES} <= {b"PWD", b"_", b"SHLVL"}
    assert found[b"PWD"] == b"/usr"


def test_a_directory_that_cannot_be_entered_is_named() -> None:
    done = enter({}, "/not/there")

    assert (done.returncode, done.stderr) == (ENTRY_FAILED, b"holdwater: cannot enter /not/there\n")


@pytest.mark.parametrize("name", ["", "A=B", "A\0B"])
def test_a_name_that_no_environment_can_hold_is_refused(name: str) -> None:
    for give in (render_setenv, lambda variables: render_settings(variables, "/")):
        with pytest.raises(ValueError, match="illegal environment variable name"):
            give({name: "x"})


def test_a_value_with_a_nul_becomes_no_argument_of_bubblewrap() -> None:
    handover = DescriptorHandover()
    try:
        with pytest.raises(ValueError, match="null byte"):
            build_bwrap_argv(handover, "bwrap", render_setenv({"A": "x\0--bind\0/\0/"}), b"")
        with pytest.raises(ValueError, match="null byte"):
            render_settings({"A": "x\0y"}, "/")
    finally:
        handover.close()
