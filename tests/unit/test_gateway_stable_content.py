"""Which messages of the Messages dialect are the same when they are sent again."""

import msgspec
import pytest

from holdwater.dialect.messages import MessagesDialect, strip_transient
from holdwater.gateway.recorder import ConversationRecorder

HINT = {"cache_control": {"type": "ephemeral"}}


def said(role, content):
    return msgspec.json.encode({"role": role, "content": content})


def block(text, **more):
    return {"type": "text", "text": text, **more}


@pytest.mark.parametrize("text", ["plain", 'he said "x" \\ é\n', "", '[{"type":"text"}]'])
def test_a_text_equals_its_block_with_and_without_a_hint(text):
    forms = [text, [block(text)], [block(text, **HINT)]]

    assert {strip_transient(said("user", form)) for form in forms} == {said("user", text)}


@pytest.mark.parametrize(
    "content",
    [
        [],
        [block("a"), block("b")],
        [block("a", citations=[])],
        [{"type": "thinking", "text": "a"}],
        [{"type": "tool_use", "id": "1", "name": "x", "input": {"content": [block("a")]}}],
    ],
)
def test_content_beyond_a_single_text_stays_unchanged(content):
    assert strip_transient(said("assistant", content)) == said("assistant", content)


def test_what_cannot_be_read_stays():
    for content in (
        b"",
        b"1",
        b'{"content":[{"type":"text"',
        b'{"content":[{"t":1}]}',
        b'{"content":[{"t" 1}]}',
    ):
        assert strip_transient(content) == content


def test_a_conversation_goes_on_when_its_hint_moves():
    """As Claude Code sends it: a text is a block only for as long as the hint stands in it."""
    recorder = ConversationRecorder(MessagesDialect())

    def sent(number, *messages):
        body = b'{"messages":[%s],"model":"m"}' % b",".join(messages)
        delta = recorder.find_delta(recorder.read(bytearray(body)), b'{"model":"m"}')
        recorder.on_written(delta, number)
        return delta.parent, delta.keep, len(delta.append)

    first = said("user", "do it"), said("system", [block("rules", **HINT)])
    then = (
        said("user", "do it"),
        said("system", "rules"),
        said("assistant", "ok"),
        said("user", [block("go", **HINT)]),
    )
    last = *then[:3], said("user", "go"), said("assistant", "done"), said("user", [block("and", **HINT)])

    assert [sent(1, *first), sent(2, *then), sent(3, *last)] == [(None, 0, 2), (1, 2, 2), (2, 4, 2)]
