"""When a budget is used up, and what is said of it; parameters and rates as the user writes them."""

import pytest

from holdwater.core.errors import BadInput
from holdwater.core.option_values import parse_sampling
from holdwater.core.prices import RunBudget, find_used_up
from holdwater.core.records import FailureOrigin, LimitOverrides, Limits, ModelUsage

USED = ModelUsage(requests=4, input_tokens=100, output_tokens=20, nanodollars=5 * 10**8, priced=4)


@pytest.mark.parametrize(
    ("limits", "kind", "figures"),
    [
        (Limits(requests=4), "requests", "4 of 4 requests"),
        (Limits(input_tokens=90), "tokens", "100 of 90 input tokens"),
        (Limits(output_tokens=20), "tokens", "20 of 20 output tokens"),
        (Limits(cost=0.25), "cost", r"\$0.50 of \$0.25"),
    ],
)
def test_an_attempt_names_the_budget_that_it_used_up(limits, kind, figures):
    failure = find_used_up(limits, USED)
    assert (failure.where, failure.kind) == (FailureOrigin.LIMIT, kind)
    assert failure.message == f"the attempt's budget is used up: {figures}".replace("\\", "")


def test_usage_below_the_budget_continues_and_calls_in_progress_count():
    limits = Limits(requests=6, input_tokens=101, output_tokens=21, cost=0.51)
    assert find_used_up(limits, USED) is None
    assert find_used_up(limits, USED, calling=1) is None
    assert find_used_up(limits, USED, calling=2).kind == "requests"
    assert find_used_up(Limits(), USED) is None


def test_an_instance_can_ask_for_a_budget_of_its_own():
    assert Limits(requests=9, cost=1.0).with_overrides(LimitOverrides(requests=3)) == Limits(
        requests=3, cost=1.0
    )


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (RunBudget(requests=4), "4 of 4 requests"),
        (RunBudget(tokens=119), "120 of 119 tokens"),
        (RunBudget(cost=0.5), "$0.50 of $0.50"),
        (RunBudget(seconds=10), "12 of 10 s"),
    ],
)
def test_a_run_names_the_budget_that_it_used_up(budget, words):
    assert words in budget.find_used_up(USED, 12.0)
    assert RunBudget(requests=5, tokens=121, cost=0.6, seconds=13).find_used_up(USED, 12.0) is None


def test_sampling_parameters_are_read():
    assert parse_sampling(["temperature=0.7", "stop=[1]", "effort=low"]) == {
        "temperature": 0.7,
        "stop": [1],
        "effort": "low",
    }
    with pytest.raises(BadInput, match="must look like"):
        parse_sampling(["temperature"])
