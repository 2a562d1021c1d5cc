"""Options of a run that are misspelled or unknown: they are refused by name, and nothing is dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdwater as hw


@pytest.mark.parametrize(
    ("option", "hint"), [("concurency", "did you mean `concurrency`?"), ("limits", "did you mean `limit`?")]
)
def test_an_unknown_option_is_refused_before_anything_is_made(tmp_path: Path, option: str, hint: str) -> None:
    out = tmp_path / "run"

    with pytest.raises(hw.BadInput, match=f"unknown option: `{option}`") as caught:
        hw.run("demo", out=out, **{option: 3})

    assert caught.value.hint == hint
    assert not out.exists()


def test_an_unknown_option_of_a_resumed_run_is_refused(tmp_path: Path) -> None:
    hw.run("demo", "nop", out=tmp_path / "run", only=["cli-flags"], network="open", workers=0)

    with pytest.raises(hw.BadInput, match="unknown option: `rety`"):
        hw.resume(tmp_path / "run", rety=["failed"])
