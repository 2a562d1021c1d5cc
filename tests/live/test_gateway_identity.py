"""Requests that ask for different things are different requests: none gets the other's recorded reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gateway_harness import Scene
from tests.live.test_gateway_replay import place

from holdwater.testing.scripted_model import ScriptedReply, serve_script

HINT = {"cache_control": {"type": "ephemeral"}}


def referring(id: str, **more: str) -> dict[str, Any]:
    items = [{"id": id, **more}, {"role": "user", "content": "go on"}]
    return {"path": "/responses", "body": {"model": "m", "input": items}}


def editing(input: dict[str, Any], **hint: Any) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "t1", "name": "edit", "input": input}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "done", **hint}
    messages = [
        {"role": "user", "content": "edit it"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    return {"path": "/messages", "body": {"model": "m", "max_tokens": 9, "messages": messages}}


async def ask(s: Scene, request: dict[str, Any]) -> bytes:
    headers = {"Authorization": f"Bearer {s.session.key}"}
    url = s.gateway.url + request["path"]
    async with s.http.post(url, json=request["body"], headers=headers) as response:
        assert response.status == 200
        return await response.read()


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (referring("msg_1", type="item_reference"), referring("msg_2", type="item_reference"), False),
        (referring("msg_1"), referring("msg_2"), False),
        (referring("msg_1", type="item_reference"), referring("msg_1", type="item_reference"), True),
        (editing({"file": "a", **HINT}), editing({"file": "a"}), False),
        (editing(HINT), editing({"cache_control": {"type": "none"}}), False),
        (editing({"deep": [{"cache_control": None}]}), editing({"deep": [{}]}), False),
        (editing({"file": "a", **HINT}, **HINT), editing({"file": "a", **HINT}), True),
        (editing({"file": "a"}, **HINT), editing({"file": "a"}), True),
    ],
)
async def test_a_recorded_reply_answers_its_own_request_alone(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], same: bool
) -> None:
    asked: list[Any] = []

    def script(request: dict[str, Any]) -> ScriptedReply:
        asked.append(request)
        return ScriptedReply(text=f"answer {len(asked)}")

    async with serve_script(script) as url, place(tmp_path, url) as here:
        async with here.attempt(1) as s:
            before = await ask(s, first)
        async with here.attempt(2, 1) as s:
            after = await ask(s, second)

    assert (len(asked) == 1, b"answer 1" in after) == (same, same)
    assert b"answer 1" in before
