"""A borrower's session: a key of its own, its lender's record and budget, closed before its lender."""

import asyncio

import pytest
from tests.gateway_harness import ask, scene

from holdwater.core.errors import ModelFailed
from holdwater.core.records import Limits
from holdwater.gateway.in_process_calls import ChatClient
from holdwater.testing.scripted_model import ScriptedReply, serve_script


def client_of(s, session):
    return ChatClient(s.gateway.ask, s.gateway.url, s.gateway.url, session.key, "m")


def user(text):
    return [{"role": "user", "content": text}]


async def test_both_write_to_one_record_and_spend_one_budget():
    def say(request):
        return ScriptedReply(text="yes")

    async with (
        serve_script(say) as url,
        scene(url) as s,
        s.gateway.open_session(2, s.log, Limits(requests=3)) as lender,
    ):
        async with s.gateway.lend(lender, "judge") as borrower:
            await client_of(s, lender).chat(user("a"))
            await asyncio.gather(*(client_of(s, borrower).chat([*user("a"), *user("b")]) for _ in range(2)))
            with pytest.raises(ModelFailed, match="3 of 3"):
                await client_of(s, borrower).chat(user("c"))
            assert (borrower.usage.requests, lender.usage.requests, lender.exchanges) == (2, 3, 3)
            assert borrower.failure is not None
            assert lender.failure == borrower.failure
        with pytest.raises(ModelFailed, match="no attempt is running"):
            await client_of(s, borrower).chat(user("c"))
        assert [(e.number, e.by, e.parent, e.keep) for e in s.log.exchanges] == [
            (1, "", None, 0),
            (2, "judge", 1, 1),
            (3, "judge", 1, 1),
        ]


async def test_closing_the_lender_ends_its_borrowers_calls():
    asked, never = asyncio.Event(), asyncio.Event()

    async def hang(request):
        asked.set()
        await never.wait()

    async with serve_script(hang) as url, scene(url) as s, asyncio.TaskGroup() as group:
        lending = s.gateway.open_session(2, s.log)
        lender = await lending.__aenter__()
        borrowing = s.gateway.lend(lender, "child")
        borrower = await borrowing.__aenter__()
        call = group.create_task(_refused(client_of(s, borrower)))
        await asked.wait()
        await lending.__aexit__(None, None, None)
        assert "the attempt is over" in await call
        assert "the attempt is over" in await _refused(client_of(s, borrower))
        await borrowing.__aexit__(None, None, None)
        assert [(e.by, e.error) for e in s.log.exchanges] == [("child", "the attempt ended")]


async def _refused(client):
    with pytest.raises(ModelFailed) as raised:
        await client.chat(ask("x")["messages"])
    return raised.value.message
