"""Log probabilities keep the positions of their tokens, also where one of them is no number."""

import math

import pytest
from tests.dialect_requests import speak
from tests.live.test_gateway_replay import answered, place

from holdwater.conversation.nodes import read_nodes
from holdwater.core.token_sequences import build_sequences
from holdwater.gateway.upstreams.policy import PolicyUpstream

GIVEN = [-0.5, None, math.nan, -math.inf, -1.5]


def policy(request):
    """A reply of five tokens, of which two have a log probability."""
    logprobs = {"content": [{"token": str(n), "logprob": given} for n, given in enumerate(GIVEN)]}
    message = {"role": "assistant", "content": "01234"}
    choice = {"index": 0, "message": message, "token_ids": [0, 1, 2, 3, 4], "logprobs": logprobs}
    return {"choices": [choice], "prompt_token_ids": [7]}


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "gemini"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_a_node_has_a_log_probability_for_each_token(tmp_path, dialect, stream):
    async with place(tmp_path, "http://127.0.0.1:9") as p, p.attempt(1) as scene:
        p.gateway.steer(p.gateway.relay.default_route._replace(upstream=PolicyUpstream(policy)))
        await answered(scene, speak(dialect, "count", stream=stream))

    *_, node = nodes = list(read_nodes(p.directory, 1))
    assert (node.tokens, node.logprobs) == ((0, 1, 2, 3, 4), (-0.5, None, None, None, -1.5))
    [sequence] = build_sequences(nodes)
    assert (sequence.ids.tolist(), sequence.complete) == ([7, 0, 1, 2, 3, 4], False)
    assert [None if math.isnan(value) else value for value in sequence.logprobs] == [0.0, *node.logprobs]
