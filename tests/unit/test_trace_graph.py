"""The message graph for trainers: whose concatenated tokens are what the model saw, in every dialect."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from tests.ledger_runs import new_run
from tests.recorded_conversations import CONVERSATIONS, IMAGE, Recording, chat, says

from holdwater.conversation.trace_graph import TraceGraph, build_trace_graphs
from holdwater.conversation.trajectory import ExchangeTree


def graphs_of(
    tmp_path: Path, *turns: tuple[Any, Any, dict[str, Any]], name: str = "chat"
) -> list[TraceGraph]:
    directory = new_run(tmp_path / "run")
    talk = Recording(directory, 1, name)
    for request, reply, more in turns:
        talk.add(request, reply, **more)
    talk.log.close()
    return build_trace_graphs(ExchangeTree(directory, 1))


def tokens_of(text: str, prompt: list[int], ids: list[int], logprobs: list[float | None]) -> dict[str, Any]:
    reply = says(text)
    [choice] = reply["choices"]
    content = [{"token": "", "logprob": logprob} for logprob in logprobs]
    return {
        **reply,
        "prompt_token_ids": prompt,
        "choices": [{**choice, "token_ids": ids, "logprobs": {"content": content}}],
    }


def flatten(graph: TraceGraph, leaf: int) -> list[int]:
    """The tokens of a branch, as the package concatenates them."""
    ids: list[int] = []
    at: int | None = leaf
    while at is not None:
        ids = [*graph.nodes[at].get("token_ids", []), *ids]
        at = graph.nodes[at]["parent"]
    return ids


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_each_dialect_becomes_typed_messages(tmp_path: Path, name: str) -> None:
    [graph] = graphs_of(
        tmp_path, *((request, reply, {}) for request, reply in CONVERSATIONS[name]), name=name
    )

    messages = [node["message"] for node in graph.nodes]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [node.get("sampled", False) for node in graph.nodes] == [False, False, True, False, True]
    assert messages[0]["content"] == "You are careful."
    assert {"type": "image_url", "image_url": {"url": IMAGE}} in messages[1]["content"]
    [call] = messages[2]["tool_calls"]
    assert (call["name"], call["arguments"].replace(" ", "")) == ("bash", '{"command":"ls"}')
    assert messages[3]["tool_call_id"] == call["id"] or name == "gemini"
    assert [tool["name"] for tool in graph.tools] == ["bash"]
    assert [call["node"] for call in graph.calls] == [2, 4]


def test_a_branch_is_the_prompt_and_the_sampled_tokens(tmp_path: Path) -> None:
    [graph] = graphs_of(
        tmp_path,
        (chat("a"), tokens_of("b", [1, 2, 3], [4, 5], [-0.5, -1.5]), {}),
        (chat("a", "b", "c"), tokens_of("d", [1, 2, 3, 4, 5, 6], [7], [-2.0]), {}),
    )

    assert flatten(graph, 3) == [1, 2, 3, 4, 5, 6, 7]
    assert [node.get("mask") for node in graph.nodes] == [
        None,
        [False] * 3 + [True] * 2,
        None,
        [False, True],
    ]
    assert [node.get("logprobs") for node in graph.nodes] == [None, [-0.5, -1.5], None, [-2.0]]


def test_a_history_with_other_tokens_is_another_branch(tmp_path: Path) -> None:
    [graph] = graphs_of(
        tmp_path,
        (chat("a"), tokens_of("b", [1, 2, 3], [4, 5], [-0.5, -1.5]), {}),
        (chat("a", "b", "c"), tokens_of("d", [1, 2, 3, 45, 6], [7], [-2.0]), {}),
    )

    leaves = {*range(len(graph.nodes))} - {node["parent"] for node in graph.nodes}
    assert sorted(flatten(graph, leaf) for leaf in leaves) == [[1, 2, 3, 4, 5], [1, 2, 3, 45, 6, 7]]


def test_a_token_without_its_log_probability_is_not_trained_on(tmp_path: Path) -> None:
    [graph] = graphs_of(tmp_path, (chat("a"), tokens_of("b", [1], [2, 3, 4], [-0.5, None, -1.0]), {}))

    assert graph.nodes[1]["mask"] == [False, True, False, True]
    assert graph.nodes[1]["logprobs"] == [-0.5, -1.0]


def test_a_child_attempt_has_a_graph_of_its_own(tmp_path: Path) -> None:
    own, child = graphs_of(
        tmp_path,
        (chat("a"), tokens_of("b", [1], [2], [-0.5]), {}),
        (chat("a"), tokens_of("well", [1], [9], [-0.5]), {"by": "judge"}),
    )

    assert (own.name, [node.get("token_ids") for node in own.nodes]) == ("", [None, [1, 2]])
    assert (child.name, [node.get("token_ids") for node in child.nodes]) == ("judge", [None, [1, 9]])


def test_the_calls_of_a_judge_are_left_out(tmp_path: Path) -> None:
    [graph] = graphs_of(
        tmp_path,
        (chat("a"), says("b"), {}),
        (chat("is it good?"), says("yes"), {"by": "grader"}),
    )

    assert [node["message"]["content"] for node in graph.nodes] == ["a", "b"]


def test_a_failed_call_is_a_call_with_an_error(tmp_path: Path) -> None:
    [graph] = graphs_of(tmp_path, (chat("a"), None, {"status": 500, "error": "broke off"}))

    [call] = graph.calls
    assert call["error"] == {"type": "ProviderError", "message": "broke off"}
    assert graph.nodes == []


def route(reply: dict[str, Any], rows: list[int], start: int = 0) -> dict[str, Any]:
    """Add the experts of one layer, two for each token, as an engine returns them."""
    data = base64.b64encode(bytes(expert for row in rows for expert in (row, row + 100))).decode()
    routed = {"data": data, "shape": [len(rows), 1, 2], "start": start}
    return {**reply, "choices": [{**reply["choices"][0], "routed_experts": routed}]}


def read_rows(node: dict[str, Any]) -> list[int] | None:
    array = node["routed_experts"]
    if array is None:
        return None
    assert (array["shape"], array["dtype"]) == ([len(node["token_ids"]), 1, 2], "uint8")
    return list(array["data"][::2])


@pytest.mark.parametrize("start", [0, 3])  # the engine leaves out what a cache already had
def test_each_token_has_the_experts_that_were_chosen_for_it(tmp_path: Path, start: int) -> None:
    first = route(tokens_of("one", [1, 2], [3, 4], [-1.0, -1.0]), [11, 12, 13])
    rows = [11, 12, 13, 14, 15, 16]
    second = route(tokens_of("two", [1, 2, 3, 4, 5], [6, 7], [-1.0, -1.0]), rows[start:], start)
    [graph] = graphs_of(
        tmp_path,
        (chat("a"), first, {}),
        (
            {"messages": [*chat("a")["messages"], first["choices"][0]["message"], *chat("b")["messages"]]},
            second,
            {},
        ),
    )

    sampled = [node for node in graph.nodes if node.get("sampled")]
    assert [read_rows(node) for node in sampled] == [[11, 12, 13, 14], [15, 16, 16]]


@pytest.mark.parametrize(
    "routed", [{}, {"data": "!", "shape": [1, 1, 1]}, {"data": "", "shape": [9, 1, 2]}, [1]]
)
def test_routing_that_cannot_be_read_is_left_out(tmp_path: Path, routed: Any) -> None:
    reply = tokens_of("one", [1, 2], [3], [-1.0])
    [choice] = reply["choices"]
    [graph] = graphs_of(
        tmp_path, (chat("a"), {**reply, "choices": [{**choice, "routed_experts": routed}]}, {})
    )

    assert "routed_experts" not in graph.nodes[-1]
