"""The table of fields that cannot be translated: each row is played, and none is missing."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.dialect_requests import Request, message_of, send, speak
from tests.gateway_harness import scene

from holdwater.core.summary import LEFT_OUT
from holdwater.dialect import DIALECTS
from holdwater.testing.scripted_model import ScriptedReply, serve_script

PAGE = Path(__file__).parents[2] / "docs" / "translation.md"
ROW = re.compile(r"\| `(\w+)` \| `([^`]+)` \| `([^`]+)` \| (any|`\w+`) \| (refused|left out) \|")
TEXT = {"type": "text", "text": "more"}
# The rest of an item that a row adds to a list.
ITEMS: dict[str, dict[str, Any]] = {
    "messages[]": {"role": "user"},
    "messages[].content[]": TEXT,
    "messages[].content[].content[]": TEXT,
    "system[]": TEXT,
    "contents[]": {"role": "user"},
    "contents[].parts[]": {"text": "more"},
    "input[].content[]": {"type": "input_file"},
}


class Row(NamedTuple):
    agent: str
    field: str
    value: str
    server: str
    outcome: str

    @property
    def servers(self) -> list[str]:
        named = self.server.strip("`")
        return [d for d in ("chat", "messages") if d != self.agent and named in ("any", d)]

    @property
    def word(self) -> str:
        """A text that the server's request has only if the field is in it."""
        value = json.loads(self.value)
        last = self.field.rpartition(".")[2]
        return f'"{value}"' if last == "type" else f'"{next(iter(value)) if last == "tools[]" else last}":'


ROWS = [Row(*match) for match in ROW.findall(PAGE.read_text())]
PLAYED = [
    pytest.param(row, server, id=f"{row.agent}-{row.field}-{server}")
    for row in ROWS
    for server in row.servers
]


def add(place: dict[str, Any], path: str, value: Any, done: str = "") -> None:
    """Add a value to a request, at the path of its field."""
    name, _, rest = path.partition(".")
    listed = name.endswith("[]")
    name = name.removesuffix("[]")
    done = f"{done}.{name}".lstrip(".") + "[]" * listed
    if not rest:
        place[name] = [value] if listed else value
        return
    if not listed:
        add(place.setdefault(name, {}), rest, value, done)
        return
    if not isinstance(place.get(name), list):
        place[name] = []
    place[name].append(dict(ITEMS.get(done, {})))
    add(place[name][-1], rest, value, done)


def request_with(row: Row) -> Request:
    request = speak(row.agent, "hi")
    body = json.loads(request.body)
    add(body, row.field, json.loads(row.value))
    return request._replace(body=json.dumps(body).encode())


@pytest.mark.parametrize(("row", "server"), PLAYED)
async def test_a_field_is_refused_or_left_out(row: Row, server: str) -> None:
    requests: list[Any] = []
    notes: list[tuple[str, str]] = []

    def answer(request: Any) -> ScriptedReply:
        requests.append(request)
        return ScriptedReply(text="fine")

    async with serve_script(answer, dialects=[server]) as url, scene(url, server=server, notes=notes) as s:
        async with send(s, request_with(row)) as response:
            reply = json.loads(await response.read())
        failure = s.session.failure
    if row.outcome == "refused":
        assert (response.status, requests) == (400, [])
        assert f"`{row.field}` cannot be translated" in message_of(reply)
        assert failure is not None
        assert (failure.kind, failure.again) == ("invalid", False)
    else:
        assert response.status == 200
        assert notes == [(LEFT_OUT, notes[0][1])]
        assert f"without `{row.field}`" in notes[0][1]
        assert row.word not in json.dumps(requests).replace("\\", "")


def test_the_table_has_each_rule_once() -> None:
    rules = {
        (name, rule.field, "refused" if rule.refused else "left out", rule.servers or ("chat", "messages"))
        for name, dialect in DIALECTS.items()
        for rule in dialect.untranslated
    }
    choices = {(row.agent, row.field) for row in ROWS if DIALECTS[row.agent].choice_key == row.field}
    rows = [row for row in ROWS if (row.agent, row.field) not in choices]
    listed = [(row.agent, row.field, row.outcome, row.servers) for row in rows]
    wanted = [
        (name, field, outcome, [server for server in servers if server != name])
        for name, field, outcome, servers in rules
    ]
    assert sorted(listed) == sorted(wanted)
    assert len(choices) == 4
    assert len(ROWS) == PAGE.read_text().count("| refused |") + PAGE.read_text().count("| left out |")


async def test_a_field_that_is_left_out_is_named_once() -> None:
    notes: list[tuple[str, str]] = []
    async with (
        serve_script(lambda request: ScriptedReply(text="fine")) as url,
        scene(url, server="chat", notes=notes) as s,
    ):
        for options in ({"metadata": {"a": "b"}}, {"metadata": {"a": "c"}, "service_tier": "auto"}):
            async with send(s, speak("messages", "hi", **options)) as response:
                assert response.status == 200
    told = "calls in `messages` go to the server as `chat` without"
    assert notes == [(LEFT_OUT, f"{told} `metadata`"), (LEFT_OUT, f"{told} `service_tier`")]


@pytest.mark.parametrize("agent", ["responses", "messages", "gemini", "chat"])
async def test_an_option_of_the_server_passes(agent: str) -> None:
    requests: list[Any] = []

    def answer(request: Any) -> ScriptedReply:
        requests.append(request)
        return ScriptedReply(text="fine")

    server = "messages" if agent == "chat" else "chat"
    option = {"return_token_ids": True}
    async with serve_script(answer) as url, scene(url, server=server) as s:
        given = {"generationConfig": option} if agent == "gemini" else option
        async with send(s, speak(agent, "hi", **given)) as response:
            assert response.status == 200
    assert requests[0]["return_token_ids"] is True
