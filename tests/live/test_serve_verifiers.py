"""The verifiers protocol, tried with the package's own client: tokens, groups, refusals, failures, health."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server_harness import SUITE, server
from tests.verifiers_harness import END, EXPERTS, LOGPROB, MARKS, token_model, tokenize, verifiers_client

import holdwater as hw

SCENE = SUITE.replace(
    "    for n in range(8):",
    """    for name, data in OTHERS.items():
        yield hw.Instance(id=name, instruction=name, data=data)
    for n in range(8):""",
).replace(
    "def instances():",
    """OTHERS = {
    "raises": {"end": "raise"},
    "ungraded": {"grade": "raises"},
    "refuse": {},
    "scored": {"score": 0.25},
}

def instances():""",
)
NOTES = {"kept": [1, {"deep": True}], "text": "ü"}
TASKS: dict[str, dict[str, Any]] = {
    "plain": {"task": {"id": "i0", "prompt": "task 0", "notes": NOTES}},
    "named": {"task": {"name": "i1"}},
    **{f"member {n}": {"task": {"id": "i2"}} for n in range(4)},
    "eval": {"task": {"id": "i3"}, "kind": "eval", "sampling": {"temperature": 0.5}},
    "eval with tokens": {
        "task": {"id": "i3"},
        "kind": "eval",
        "sampling": {"logprobs": True, "extra_body": {"return_token_ids": True, "top_k": 7}},
    },
    "scored": {"task": {"id": "scored"}},
    "raises": {"task": {"id": "raises"}},
    "ungraded": {"task": {"id": "ungraded"}},
    "no model": {"task": {"id": "refuse"}},
    "unknown": {"task": {"id": "nowhere"}},
    "nameless": {"task": {}},
    "headers": {"task": {"id": "i5"}, "headers": {"X-Team": "t"}},
    "bad url": {"task": {"id": "i5"}, "url": "http://user:word@host/v1"},
}


class Played:
    """What the client got, by the name of the task."""

    def __init__(self) -> None:
        self.lines: dict[str, dict[str, Any]] = {}
        self.healthy = False
        self.keys: set[str] = set()
        self.bodies: list[dict[str, Any]] = []
        self.log = ""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    place = tmp_path_factory.mktemp("verifiers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCENE_KEY", "secret-of-the-scene")
        yield asyncio.run(play(place))


async def play(place: Path) -> Played:
    seen, address = Played(), f"{place}/vf.socket"
    flags = ("--protocol", "verifiers", "--protocol-listen", f"unix:{address}", "--protocol-key", "SCENE_KEY")
    async with token_model() as model:
        with server(place, *flags, "--retries", "0", "--concurrency", "16", suite=SCENE) as serve:
            async with verifiers_client(f"ipc://{address}", model.url, *TASKS.values()) as client:
                assert await client.read_line() == {"ready": True}
                lines = await client.read_rollouts(len(TASKS))
                seen.healthy = (await client.read_line())["healthy"]
            seen.log = serve.said
        seen.lines = dict(zip(TASKS, lines, strict=True))
        seen.keys, seen.bodies = model.keys, model.bodies
    audit = hw.audit(place / "run")
    assert (audit.lost, audit.duplicated) == (0, 0)
    return seen


def find_trace(played: Played, name: str) -> dict[str, Any]:
    [trace] = played.lines[name]["traces"]
    found: dict[str, Any] = trace
    return found


def test_a_trace_has_exact_tokens_masks_and_log_probabilities(played: Played) -> None:
    trace = find_trace(played, "plain")
    [branch] = trace["branches"]

    assert branch["token_ids"] == tokenize(trace["messages"])
    sampled = "".join(chr(i) for i, mine in zip(branch["token_ids"], branch["mask"], strict=True) if mine)
    replies = [message["content"] for message in trace["messages"] if message["role"] == "assistant"]
    assert sampled == "".join(reply + chr(END) for reply in replies) and len(replies) == trace["turns"] == 3
    assert branch["logprobs"] == [LOGPROB if mine else 0.0 for mine in branch["mask"]]
    assert branch["token_ids"][0] == MARKS["user"]
    assert trace["usage"]["completion_tokens"] == sum(branch["mask"])


def test_a_trace_has_the_experts_of_each_token(played: Played) -> None:
    [branch] = find_trace(played, "plain")["branches"]

    followed = [token % EXPERTS for token in branch["token_ids"][:-1]]
    assert branch["experts"] == [*followed, followed[-1]]  # nothing follows the last token


def test_an_episode_names_the_task_that_its_trainer_sent(played: Played) -> None:
    answered = [line for line in played.lines.values() if "refused" not in line]
    assert len(answered) == 12 and all(line["same_task"] for line in answered)
    assert played.lines["plain"]["data"]["notes"] == NOTES


def test_tasks_are_found_by_id_or_name(played: Played) -> None:
    assert find_trace(played, "plain")["messages"][0]["content"] == "task 0"
    assert find_trace(played, "named")["messages"][0]["content"] == "task 1"


def test_the_same_task_many_times_is_as_many_rollouts(played: Played) -> None:
    members = [find_trace(played, f"member {n}") for n in range(4)]
    assert [trace["reward"] for trace in members] == [1.0] * 4
    assert all(played.lines[f"member {n}"]["ok"] for n in range(4))


def test_only_clients_that_train_ask_for_tokens_unasked(played: Played) -> None:
    [without] = find_trace(played, "eval")["branches"]
    [with_tokens] = find_trace(played, "eval with tokens")["branches"]
    assert without["token_ids"] == [] and with_tokens["token_ids"] != []
    assert find_trace(played, "eval")["turns"] == 3


def test_a_reward_and_a_failed_agent_are_a_reward(played: Played) -> None:
    assert find_trace(played, "scored")["rewards"] == {"reward": {"score": 0.25, "weight": 1.0}}
    raises = find_trace(played, "raises")
    assert (raises["ok"], raises["reward"], raises["stop"]) == (True, 1.0, "agent_exception")


def test_failures_of_others_are_errors_of_their_kind(played: Played) -> None:
    ungraded, unanswered = find_trace(played, "ungraded"), find_trace(played, "no model")
    assert [error["type"] for error in ungraded["errors"]] == ["TaskError"]
    assert [error["type"] for error in unanswered["errors"]] == ["ProviderError"]
    assert {trace["ok"] for trace in (ungraded, unanswered)} == {False}
    assert ungraded["rewards"] == {} and ungraded["turns"] == 1
    assert not played.lines["no model"]["ok"] and played.lines["no model"]["errors"]


def test_bad_requests_are_refused_in_the_protocols_own_form(played: Played) -> None:
    refusals = {name: line["refused"] for name, line in played.lines.items() if "refused" in line}
    assert refusals == {
        "unknown": "unknown: no such instance: `nowhere`",
        "nameless": "unknown: neither `id` nor `name` of the task names an instance of the suite",
        "headers": "invalid: `client.headers` are not passed on: X-Team",
        "bad url": "invalid: `client.base_url` must not contain credentials:"
        " they would be stored in the run's files",
    }
    assert played.healthy


def test_only_named_keys_reach_the_endpoint_and_no_log(played: Played) -> None:
    assert played.keys == {"Bearer secret-of-the-scene"}
    assert "secret-of-the-scene" not in played.log
