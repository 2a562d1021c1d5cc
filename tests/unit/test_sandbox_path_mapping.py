"""Paths as a sandbox sees them: the same as the kernel finds them, with its mounts in their places."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdwater.core.errors import SandboxFailed
from holdwater.sandbox.layout import PathMapping

WORK = "/run/holdwater/work"
STEPS = st.lists(st.sampled_from(["a", "b", "c", "..", ".", "", "none"]), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(path=STEPS, b=STEPS, c=STEPS, absolute=st.booleans())
def test_links_and_dots_lead_where_the_kernel_says(
    path: list[str], b: list[str], c: list[str], absolute: bool
) -> None:
    with tempfile.TemporaryDirectory() as base:
        host = Path(os.path.realpath(base), "work")
        (host / "a" / "a").mkdir(parents=True)
        for name, target in (("b", b), ("a/c", c)):
            (host / name).symlink_to(f"{host if absolute else '.'}/{'/'.join(target)}")
        asked = f"{host}/{'/'.join(path)}"
        try:
            real = os.path.realpath(asked, strict=True)
        except OSError:
            return  # a loop, or nothing there

        places = PathMapping(str(host), {"/": "/"}, {str(host): str(host)})
        if real == str(host) or real.startswith(f"{host}/"):
            assert places.locate(asked) == (str(host), list(Path(real).relative_to(host).parts))
        else:
            with pytest.raises(SandboxFailed):
                places.locate(asked)


def test_a_link_is_followed_from_mount_to_mount(tmp_path: Path) -> None:
    for name in ("work", "home", "tmp/shown"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "work/to-home").symlink_to("/run/holdwater/home/to-work")
    (tmp_path / "home/to-work").symlink_to("../work/file")
    (tmp_path / "work/to-tmp").symlink_to("/tmp/to-work")
    (tmp_path / "tmp/to-work").symlink_to(f"{WORK}/other")
    mounts = {"/tmp": tmp_path / "tmp", WORK: tmp_path / "work", "/run/holdwater/home": tmp_path / "home"}
    places = PathMapping(WORK, {inside: str(host) for inside, host in mounts.items()}, {WORK: mounts[WORK]})

    assert [places.locate(path)[1] for path in ("to-home", f"{WORK}/to-tmp")] == [["file"], ["other"]]


@pytest.mark.parametrize("name", ["a", "./a", f"{WORK}/a", "/shown/a"])
def test_a_program_is_a_file_that_may_be_executed(tmp_path: Path, name: str) -> None:
    program = tmp_path / "a"
    places = PathMapping(WORK, {WORK: str(tmp_path), "/shown": str(tmp_path)}, {})
    found = []
    for mode in (0o644, 0o755):
        program.write_text("#!/bin/sh\n")
        program.chmod(mode)
        found.append(bool(places.find_program(name, "/none:/shown")))
    program.unlink()
    program.mkdir()

    assert [*found, bool(places.find_program(name, "/none:/shown"))] == [False, True, False]
