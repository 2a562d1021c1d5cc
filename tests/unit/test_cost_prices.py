"""What a usage costs, where prices come from, and that what is unknown stays so through every sum."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdwater.core.errors import BadInput
from holdwater.core.prices import (
    ModelPrice,
    TierRates,
    add_cost,
    compute_cost,
    find_price,
    format_dollars,
    to_nanodollars,
)
from holdwater.core.records import ModelUsage
from holdwater.gateway.prices import price_of, read_prices

PRICE = ModelPrice(input=1.25, cached=0.125, written=2.0, output=10.0)


def test_each_kind_of_token_has_its_price():
    usage = ModelUsage(
        requests=1,
        input_tokens=1_000_000,
        cached_tokens=400_000,
        written_tokens=100_000,
        output_tokens=50_000,
    )
    assert compute_cost(usage, PRICE) == to_nanodollars(0.5 * 1.25 + 0.4 * 0.125 + 0.1 * 2.0 + 0.05 * 10)


def test_cached_input_without_a_price_costs_as_much_as_other_input():
    usage = ModelUsage(requests=1, input_tokens=1_000_000, cached_tokens=400_000, written_tokens=5)
    assert compute_cost(usage, ModelPrice(input=2, output=0)) == to_nanodollars(2)


def test_reasoning_costs_its_own_price_or_that_of_output():
    usage = ModelUsage(requests=1, output_tokens=1_000_000, reasoning_tokens=400_000)
    assert compute_cost(usage, ModelPrice(input=1, output=2)) == to_nanodollars(2)
    assert compute_cost(usage, ModelPrice(input=1, output=2, reasoning=5)) == to_nanodollars(
        0.6 * 2 + 0.4 * 5
    )
    more = ModelUsage(requests=1, output_tokens=10, reasoning_tokens=400_000)  # no part of the output there
    assert compute_cost(more, ModelPrice(input=1, output=2, reasoning=5)) == 10 * 5000


def test_a_long_input_is_priced_as_a_whole_by_its_tier():
    price = ModelPrice(
        input=1,
        output=1,
        over=(TierRates(tokens=500, input=4, output=8), TierRates(tokens=200, input=2, output=2)),
    )
    costs = [compute_cost(ModelUsage(input_tokens=n, output_tokens=1), price) for n in (200, 201, 501)]
    assert costs == [201_000, 202 * 2000, 501 * 4000 + 8000]


def test_an_exact_name_precedes_patterns_and_a_longer_pattern_a_shorter():
    table = {p: ModelPrice(input=i, output=0) for i, p in enumerate(("*", "gpt-*", "gpt-5*", "gpt-5"))}
    found = [find_price(table, model) for model in ("gpt-5", "gpt-5-mini", "gpt-4", "o3")]
    assert [price.input for price in found if price] == [3, 2, 1, 0]
    assert find_price({}, "gpt-5") is None


amounts = st.integers(0, 10**7)
usages = st.builds(
    ModelUsage, requests=st.just(1), input_tokens=amounts, output_tokens=amounts, cached_tokens=amounts
)


@given(st.lists(st.tuples(usages, st.sampled_from([PRICE, None]), st.booleans()), max_size=8))
def test_a_sum_is_exact_in_any_order_and_unknown_with_unknown_parts(calls):
    parts = [add_cost(usage, price, billed=billed) for usage, price, billed in calls]
    sums = [
        list(itertools.accumulate(order, ModelUsage.plus, initial=ModelUsage()))[-1]
        for order in (parts, parts[::-1])
    ]
    assert sums[0] == sums[1]
    assert (sums[0].cost is None) == any(part.cost is None for part in parts)
    assert sums[0].nanodollars == sum(part.nanodollars for part in parts)


def test_unknown_is_not_zero():
    assert add_cost(ModelUsage(requests=1, input_tokens=5), None).cost is None
    assert add_cost(ModelUsage(requests=1), PRICE).cost is None  # no usage came
    assert add_cost(ModelUsage(requests=1), PRICE, billed=False).cost == 0.0
    assert ModelUsage().cost == 0.0


def test_a_table_is_read_and_its_mistakes_are_named(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text('["gpt-5*"]\ninput = 1.25\noutput = 10\nover = [{tokens = 9, input = 2, output = 3}]\n')
    assert read_prices(path)["gpt-5*"] == ModelPrice(
        input=1.25, output=10, over=(TierRates(tokens=9, input=2, output=3),)
    )
    for text, words in (
        ("[x]\ninput = 1\n", "`x`: object missing required field `output`"),
        ("[x]\ninput = 1\noutput = 1\ninputs = 1\n", "`x`: unknown field: `inputs`"),
        ("[x]\ninput = -1\noutput = 1\n", "`x`: a price must be a number of US dollars"),
        ("x = ", "not TOML"),
    ):
        path.write_text(text)
        with pytest.raises(BadInput, match=words):
            read_prices(path)
    with pytest.raises(BadInput, match="cannot read"):
        read_prices(tmp_path / "none.toml")


def test_an_unknown_model_has_no_price():
    assert price_of("a-model-of-nobody", {}) is None
    assert price_of("mine", {"m*": PRICE}) == PRICE


def test_the_published_prices_are_asked_where_they_are_installed():
    pytest.importorskip("genai_prices")
    price = price_of("claude-sonnet-4-5", {})
    assert price is not None
    assert price.written == price.input * 1.25 < price.over[0].written
    assert price_of("claude-sonnet-4-5", {}, "http://127.0.0.1:8000/v1") is None


def test_money_as_people_read_it():
    assert [format_dollars(to_nanodollars(x)) for x in (0, 0.5, 0.0042, 1234.5, 1e-8)] == [
        "$0.00",
        "$0.50",
        "$0.0042",
        "$1,234.50",
        "less than $0.000001",
    ]
