"""What is kept of which attempt, which runs are spared, and what a time is: decided without a disk."""

from __future__ import annotations

import pytest

from holdwater.cli.prune import check_request, parse_age
from holdwater.core.config import KeepRule
from holdwater.core.errors import BadInput
from holdwater.core.policy import keeps
from holdwater.ledger.pruning import PruneOptions, PruneResult, decide_fate, explain_sparing
from holdwater.run.setup.options import parse_settings

OPEN, GONE, GOING = None, 4096, None


@pytest.mark.parametrize("keep", KeepRule)
@pytest.mark.parametrize("outcome", ["passed", "failed", "model", "worker", OPEN])
def test_the_rule_decides_whether_a_sample_is_kept(keep: KeepRule, outcome: str | None) -> None:
    kept = {
        KeepRule.ALL: {"passed", "failed", "model", "worker", OPEN},
        KeepRule.FAILURES: {"failed", "model", "worker", OPEN},
        KeepRule.NONE: {OPEN},  # a retry may need its recorded replies
    }

    assert keeps(keep, outcome) == (outcome in kept[keep])


@pytest.mark.parametrize(
    ("row", "goes", "stays"),
    [
        ((1, "i", True, "passed", False, None), True, False),
        ((1, "i", True, "failed", False, None), False, True),
        ((1, "i", True, OPEN, False, None), False, True),
        ((1, "i", False, "passed", False, None), False, True),  # without a verdict: it may be needed
        ((1, "i", True, "passed", True, GONE), False, False),
        ((1, "i", True, "failed", True, GOING), True, False),  # whoever dropped it was stopped
    ],
)
def test_the_fate_of_an_attempts_files(
    row: tuple[int, str, bool, str | None, bool, int | None], goes: bool, stays: bool
) -> None:
    decided = decide_fate(row, KeepRule.FAILURES)

    assert (decided.goes, decided.stays) == (goes, stays)


@pytest.mark.parametrize(
    ("state", "seen", "wanted", "left"),
    [
        ("finished", 100.0, PruneOptions(), ""),
        ("interrupted", 100.0, PruneOptions(), "interrupted, it can be resumed"),
        ("unfinished", 100.0, PruneOptions(unfinished=True), ""),
        ("finished", 995.0, PruneOptions(older_than=10.0), "not old enough"),
        ("finished", 990.0, PruneOptions(older_than=10.0), ""),
    ],
)
def test_which_runs_are_spared(state: str, seen: float, wanted: PruneOptions, left: str) -> None:
    assert explain_sparing(PruneResult(directory="r", state=state, seen=seen), wanted, now=1000.0) == left


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7d", 604800), ("12h", 43200), ("90m", 5400), ("1.5s", 1.5), ("0", 0), ("2W", 1209600)],
)
def test_times_that_people_write(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-7d", "7 years", "1e3", "7d7"])
def test_an_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="invalid time"):
        parse_age(text)


@pytest.mark.parametrize(
    "wanted",
    [PruneOptions(), PruneOptions(remove=True, compress=True), PruneOptions(remove=True, keep=KeepRule.NONE)],
)
def test_what_cannot_be_meant_is_refused(wanted: PruneOptions) -> None:
    with pytest.raises(BadInput):
        check_request(wanted)


def test_an_unknown_keep_rule_is_refused() -> None:
    assert parse_settings({"keep": "failures"})["keep"] is KeepRule.FAILURES
    with pytest.raises(BadInput, match="`--keep` must be one of `all`, `failures`, `none`: `some`"):
        parse_settings({"keep": "some"})
