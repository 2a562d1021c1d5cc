"""A policy with token ids in and out: what was sampled comes back as the same ids, turn after turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.small_tokenizer import TEMPLATE, SmallTokenizer

from holdwater.client import CallAnswer, CallBatcher, PolicyCall, SampledTokens, TokenPolicy, TokenPrompt
from holdwater.core.errors import BadInput

TOKENS = SmallTokenizer()
HELLO = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "go"}


class ScriptedSampler:
    """Samples these words, one list for each call."""

    def __init__(self, *replies: list[str]) -> None:
        self.replies = list(replies)
        self.prompts: list[list[int]] = []

    async def __call__(self, prompt: TokenPrompt) -> SampledTokens:
        self.prompts.append(prompt.ids)
        ids = TOKENS.spell(*self.replies.pop(0))
        return SampledTokens(ids, [-0.5] * len(ids), version="7")


def ask(*messages: dict[str, Any], member: int = 0, **head: Any) -> PolicyCall:
    return PolicyCall("k", member, "1", "chat", list(messages), {"model": "m", **head})


def read_reply(answer: CallAnswer) -> dict[str, Any]:
    assert answer.reply is not None
    message: dict[str, Any] = answer.reply["choices"][0]["message"]
    return message


async def converse(policy: TokenPolicy, *later: dict[str, Any]) -> tuple[CallAnswer, CallAnswer]:
    first = await policy(ask(HELLO))
    return first, await policy(ask(HELLO, read_reply(first), *later))


async def test_a_later_prompt_has_the_ids_that_were_sampled() -> None:
    sampler = ScriptedSampler(["a", "b", "<end>"], ["c", "<end>"])

    first, _ = await converse(policy := TokenPolicy(TOKENS, sampler), MORE)

    assert TOKENS.encode("ab", add_special_tokens=False) != TOKENS.spell("a", "b")
    opening = TOKENS.spell("<user>", "h", "i", "<end>", "\n", "<assistant>")
    assert sampler.prompts[0] == opening
    following = TOKENS.spell("\n", "<user>", "g", "o", "<end>", "\n", "<assistant>")
    assert sampler.prompts[1] == opening + TOKENS.spell("a", "b", "<end>") + following
    assert (policy.continued, policy.broken) == (1, 0)
    assert first.version == "7" and first.reply is not None
    assert first.reply["prompt_token_ids"] == opening
    choice = first.reply["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"]) == (TOKENS.spell("a", "b", "<end>"), "stop")
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == [-0.5] * 3


async def test_a_reply_that_was_cut_is_ended_by_the_template() -> None:
    sampler = ScriptedSampler(["a", "b"], ["c"])

    first, _ = await converse(TokenPolicy(TOKENS, sampler), MORE)

    after = sampler.prompts[1][len(sampler.prompts[0]) :]
    assert after[:4] == TOKENS.spell("a", "b", "<end>", "\n")
    assert first.reply is not None and first.reply["choices"][0]["finish_reason"] == "length"


async def test_a_reply_is_known_in_the_form_that_agents_send_back() -> None:
    sampler = ScriptedSampler(["a", "b", "<end>"], ["c"])
    policy = TokenPolicy(TOKENS, sampler)
    await policy(ask(HELLO))

    sent_back = {"role": "assistant", "content": [{"type": "text", "text": "ab"}], "refusal": None}
    await policy(ask(HELLO, sent_back, MORE))

    assert policy.continued == 1


async def test_branches_of_a_conversation_go_on_from_their_own_replies() -> None:
    sampler = ScriptedSampler(["a", "<end>"], ["b", "<end>"], ["c"], ["d"])
    policy = TokenPolicy(TOKENS, sampler)
    first, second = read_reply(await policy(ask(HELLO))), read_reply(await policy(ask(HELLO)))

    for reply in (first, second):
        await policy(ask(HELLO, reply, MORE))

    opening = len(sampler.prompts[0])
    assert [prompt[opening : opening + 2] for prompt in sampler.prompts[2:]] == [
        TOKENS.spell("a", "<end>"),
        TOKENS.spell("b", "<end>"),
    ]


@pytest.mark.parametrize("changed", [{"messages": [MORE, MORE]}, {"member": 1}, {"tools": [{"name": "x"}]}])
async def test_another_conversation_begins_with_its_own_tokens(changed: dict[str, Any]) -> None:
    sampler = ScriptedSampler(["a", "b", "<end>"], ["c"])
    policy = TokenPolicy(TOKENS, sampler)
    reply = read_reply(await policy(ask(HELLO)))

    history = changed.pop("messages", [HELLO, reply, MORE])
    await policy(ask(*history, **changed))

    assert (policy.continued, policy.broken) == (0, 0)
    assert sampler.prompts[1] == TOKENS.encode(
        TOKENS.apply_chat_template(history, add_generation_prompt=True, tokenize=False),
        add_special_tokens=False,
    )


async def test_a_template_that_rewrites_the_history_is_counted() -> None:
    forgetful = TEMPLATE.replace("in messages %}", "in messages[-2:] %}")
    sampler = ScriptedSampler(["a", "b", "<end>"], ["c"])

    await converse(policy := TokenPolicy(SmallTokenizer(forgetful), sampler), MORE)

    assert (policy.continued, policy.broken) == (0, 1)


async def test_calls_of_tools_are_parsed_and_known_again() -> None:
    def parse(text: str) -> dict[str, Any]:
        call = {"id": "1", "type": "function", "function": {"name": text, "arguments": '{"x": 1}'}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    sampler = ScriptedSampler(["a", "b", "<end>"], ["c"])
    policy = TokenPolicy(TOKENS, sampler, parse=parse)
    result = {"role": "tool", "tool_call_id": "1", "content": "go"}
    first, _ = await converse(policy, result)

    assert first.reply is not None and first.reply["choices"][0]["finish_reason"] == "tool_calls"
    tail = TOKENS.spell("<end>", "\n", "<tool>", "g", "o", "<end>", "\n", "<assistant>")
    assert sampler.prompts[1][-len(tail) :] == tail and policy.continued == 1


async def test_a_rollout_that_is_over_leaves_nothing_in_the_policy() -> None:
    sampler = ScriptedSampler(["a", "b", "<end>"], ["c"])
    policy = TokenPolicy(TOKENS, sampler)
    reply = read_reply(await policy(ask(HELLO)))

    policy.end_member("k", 0)
    await policy(ask(HELLO, reply, MORE))

    assert (policy.continued, policy.broken) == (0, 0)


def test_the_end_of_a_turn_is_one_token() -> None:
    with pytest.raises(BadInput, match="must be one token: `ends`"):
        TokenPolicy(TOKENS, ScriptedSampler(), end="ends")


async def test_each_sampled_token_has_a_log_probability() -> None:
    async def sample(prompt: TokenPrompt) -> SampledTokens:
        return SampledTokens([1, 2], [0.0])

    with pytest.raises(BadInput, match="1 log probabilities for 2 sampled tokens"):
        await TokenPolicy(TOKENS, sample)(ask(HELLO))


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_items_that_come_together_form_one_batch(kind: str) -> None:
    batches: list[list[int]] = []

    def double(items: list[int]) -> list[int]:
        batches.append(items)
        return [2 * item for item in items]

    async def double_later(items: list[int]) -> list[int]:
        return double(items)

    batcher = CallBatcher(double if kind == "plain" else double_later, most=8)
    results = await asyncio.gather(*map(batcher, range(20)))

    assert results == [2 * item for item in range(20)]
    assert [len(batch) for batch in batches] == [8, 8, 4]
    assert batcher.batches == 3


async def test_items_that_arrive_during_a_batch_form_the_next() -> None:
    batches: list[list[int]] = []
    go = asyncio.Event()

    async def hold(items: list[int]) -> list[int]:
        batches.append(items)
        await go.wait()
        return items

    batcher = CallBatcher(hold, wait=0.0)
    first = asyncio.create_task(batcher(1))
    while not batches:
        await asyncio.sleep(0)
    later = [asyncio.create_task(batcher(item)) for item in (2, 3, 4)]
    await asyncio.sleep(0)
    later[0].cancel()  # its call was dropped
    go.set()

    assert await first == 1 and [await task for task in later[1:]] == [3, 4]
    assert batches == [[1], [3, 4]]


@pytest.mark.parametrize("function", [lambda items: [1], lambda items: 1 / 0], ids=["too few", "raises"])
async def test_an_error_of_a_batch_reaches_each_of_its_items(function: Any) -> None:
    batcher = CallBatcher(function)

    results = await asyncio.gather(batcher(1), batcher(2), return_exceptions=True)

    assert all(isinstance(result, BadInput | ZeroDivisionError) for result in results)
