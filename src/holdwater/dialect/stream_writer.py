"""Writes a stream of a dialect while the same reply arrives as chunks of Chat Completions.

Each dialect has a subclass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .conversion import CompletionCall, CompletionContent, ReplyContext, parse_call
from .message import as_dict, as_list, as_string

THOUGHT, TEXT, CALL = "thought", "text", "call"
Events = Iterator[bytes]


class OpenPart(NamedTuple):
    """The part of a reply whose content arrives now."""

    kind: str
    place: int  # among all parts
    number: int = -1  # of a call, as the upstream counts
    call: CompletionCall | None = None  # its arguments are empty until the part is closed


class StreamWriter:
    """Takes chunks of a `chat.completion`, then the whole of it; yields the events of the dialect."""

    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        self._content: CompletionContent | None = None
        self._part: OpenPart | None = None
        self._pieces: list[str] = []  # of the open part; bound: `LARGEST_REPLY` of `answer_delivery.py`
        self._count = 0  # of parts that were opened
        self._answers = False  # a text or a call was opened

    def write(self, chunk: dict[str, Any]) -> Events:
        """Yield the events of a chunk."""
        if self._content is None:
            self._content = CompletionContent(chunk, self._context)
            yield from self.begin(self._content)
        for choice in map(as_dict, as_list(chunk.get("choices"))):
            if choice.get("index", 0) == 0:
                yield from self._write_delta(as_dict(choice.get("delta")))

    def finish(self, completion: dict[str, Any]) -> Events:
        """Yield the rest of the events; `completion` is the whole reply."""
        whole = CompletionContent(completion, self._context)
        if self._content is None:
            yield from self.begin(whole)
        else:
            whole.id = self._content.id
        if not self._answers:  # clients expect a text, also an empty one
            yield from self._switch(OpenPart(TEXT, self._count))
        yield from self._close()
        yield from self.end(whole, completion)

    def _write_delta(self, delta: dict[str, Any]) -> Events:
        thought = as_string(delta.get("reasoning_content")) or as_string(delta.get("reasoning"))
        text = as_string(delta.get("content")) or as_string(delta.get("refusal"))
        for kind, piece in ((THOUGHT, thought), (TEXT, text)):
            if piece:
                if self._part is None or self._part.kind != kind:
                    yield from self._switch(OpenPart(kind, self._count))
                yield from self._add(piece)
        for call in map(as_dict, as_list(delta.get("tool_calls"))):
            yield from self._write_call(call)

    def _write_call(self, call: dict[str, Any]) -> Events:
        number, part = call.get("index"), self._part
        given = as_dict(call.get("function"))
        current = part.number if part is not None and part.kind == CALL else -1
        begins = number != current if isinstance(number, int) else current < 0 or bool(call.get("id"))
        if begins:
            number = number if isinstance(number, int) else current + 1
            if number < current:
                raise ValueError(f"the tool call {number} goes on after the tool call {current} has begun")
            made = parse_call({**call, "function": {**given, "arguments": ""}}, self._context.text_tools)
            yield from self._switch(OpenPart(CALL, self._count, number, made))
        if piece := as_string(given.get("arguments")):
            yield from self._add(piece)

    def _switch(self, part: OpenPart) -> Events:
        yield from self._close()
        self._part = part
        self._count += 1
        self._answers = self._answers or part.kind != THOUGHT
        yield from self.open(part)

    def _add(self, piece: str) -> Events:
        assert self._part is not None
        self._pieces.append(piece)
        yield from self.add(self._part, piece)

    def _close(self) -> Events:
        part, whole = self._part, "".join(self._pieces)
        self._part = None
        self._pieces.clear()
        if part is not None:
            if part.call is not None:
                part = part._replace(call=part.call._replace(arguments=whole))
            yield from self.close(part, whole)

    # What each dialect writes

    def begin(self, content: CompletionContent) -> Events:
        """Yield the events before any content; `content` has the id and the model."""
        raise NotImplementedError

    def open(self, part: OpenPart) -> Events:
        raise NotImplementedError

    def add(self, part: OpenPart, piece: str) -> Events:
        """Yield the events of a piece of the open part."""
        raise NotImplementedError

    def close(self, part: OpenPart, whole: str) -> Events:
        """Yield the events that end a part; `whole` is its text, or the arguments of its call."""
        raise NotImplementedError

    def end(self, content: CompletionContent, completion: dict[str, Any]) -> Events:
        """Yield the events after all content."""
        raise NotImplementedError
