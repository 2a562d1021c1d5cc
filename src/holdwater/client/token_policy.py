"""A policy that gets and returns token ids, and a wrapper that hands over calls in batches.

A prompt that continues an earlier reply of its rollout contains the ids that were sampled, not the reply's
text in other tokens: otherwise every such turn would begin a new sequence. `policy.py` calls the policy.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from blake3 import blake3

from ..core.errors import BadInput
from ..core.serving_protocol import CallAnswer
from .policy import PolicyCall

T = TypeVar("T")
R = TypeVar("R")


class ChatTokenizer(Protocol):
    """The methods of a tokenizer that a policy needs; those of transformers have them."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> Any: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


class TokenPrompt(NamedTuple):
    """A model call as token ids."""

    ids: list[int]
    call: PolicyCall


class SampledTokens(NamedTuple):
    """A reply as token ids."""

    ids: Sequence[int]
    logprobs: Sequence[float | None] | None = None  # one for each token
    version: str = ""  # version of the policy that sampled them
    finish: str = ""  # by default `stop` after the token that ends a turn, otherwise `length`


class TokenPolicy:
    """Answers model calls by `sample`, a plain or `async` function from `TokenPrompt` to `SampledTokens`.

    The answer carries the ids and log probabilities, so that the result of the rollout has them. `end` is the
    token that ends a turn of the model, by default the tokenizer's `eos_token`. `parse` makes a message of
    the sampled text, for models that call tools. `template` has further arguments for the chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        sample: Callable[[TokenPrompt], SampledTokens | Awaitable[SampledTokens]],
        *,
        end: str | None = None,
        parse: Callable[[str], dict[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        from ..rollout.user_calls import UserCalls  # here: a client without a policy needs no worker code

        self.continued = 0  # prompts that continue an earlier reply with its own ids
        self.broken = 0  # prompts that should, but the chat template writes the history in another way
        self._tokenizer: ChatTokenizer = tokenizer
        self._sample = sample
        self._end = end if end is not None else str(tokenizer.eos_token or "")
        self._end_ids = self._encode(self._end)
        if len(self._end_ids) != 1:
            raise BadInput(f"the end of a turn must be one token: `{self._end}`", "pass `end=`")
        self._parse = parse or _make_message
        self._template = dict(template or {})
        self._calls = UserCalls("sample")
        # By rollout, then by digest of the conversation; bound: the replies of open rollouts, each once.
        self._replies: dict[tuple[str, int], dict[bytes, _SampledReply]] = {}

    async def __call__(self, call: PolicyCall) -> CallAnswer:
        chat = call.chat
        digests = list(_digest_history(chat, chat["messages"]))
        prompt, parent = self._build_prompt(chat, digests, self._replies.get((call.order, call.member), {}))
        sampled = await self._calls.call(self._sample, TokenPrompt(prompt, call))
        ids = [int(token) for token in sampled.ids]
        message = self._parse(self._tokenizer.decode(ids, skip_special_tokens=True))
        known = self._replies.setdefault((call.order, call.member), {})
        *_, digest = _digest_history(chat, [message], digests[-1])
        before = len(parent) if parent is not None else 0
        known[digest] = _SampledReply(parent, array("I", [*prompt[before:], *ids]))
        return CallAnswer(call.id, reply=self._render(message, prompt, ids, sampled), version=sampled.version)

    def end_member(self, order: str, member: int) -> None:
        """Forget a rollout that is over."""
        self._replies.pop((order, member), None)

    def _build_prompt(
        self, chat: dict[str, Any], digests: list[bytes], known: Mapping[bytes, _SampledReply]
    ) -> tuple[list[int], _SampledReply | None]:
        """Return the ids of a prompt, and the reply that they continue."""
        messages = chat["messages"]
        for kept in range(len(messages), 0, -1):
            if (reply := known.get(digests[kept])) is None:
                continue
            before = reply.list_ids()
            tail = self._encode_tail(chat, kept, ended=before[-1:] == self._end_ids)
            self.continued, self.broken = self.continued + (tail is not None), self.broken + (tail is None)
            if tail is not None:
                return before + tail, reply
            break
        return self._encode(self._render_template(chat, messages, prompts=True)), None

    def _encode_tail(self, chat: dict[str, Any], kept: int, *, ended: bool) -> list[int] | None:
        """Return the ids that follow a reply, the last of `kept` messages, up to the next reply.

        None if the template does not append: it writes the history differently after more messages.
        """
        messages = chat["messages"]
        history = self._render_template(chat, messages[:kept], prompts=False)
        whole = self._render_template(chat, messages, prompts=True)
        _, _, closing = history.rpartition(self._end)  # such as a line break after the token that ends a turn
        if not whole.startswith(history) or closing.strip():
            return None
        return self._encode(("" if ended else self._end) + closing + whole[len(history) :])

    def _render_template(self, chat: dict[str, Any], messages: list[Any], *, prompts: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            [_make_template_message(message) for message in messages],
            tools=chat.get("tools"),
            add_generation_prompt=prompts,
            tokenize=False,
            **self._template,
        )
        return str(text)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _render(
        self, message: dict[str, Any], prompt: list[int], ids: list[int], sampled: SampledTokens
    ) -> dict[str, Any]:
        """Return a `chat.completion` with the ids and log probabilities."""
        ended = ids[-1:] == self._end_ids
        finish = sampled.finish or (
            "tool_calls" if message.get("tool_calls") else "stop" if ended else "length"
        )
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish, "token_ids": ids}
        if sampled.logprobs is not None:
            if len(sampled.logprobs) != len(ids):
                raise BadInput(f"{len(sampled.logprobs)} log probabilities for {len(ids)} sampled tokens")
            pairs = zip(ids, sampled.logprobs, strict=True)
            content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
            choice["logprobs"] = {"content": content}
        return {"object": "chat.completion", "choices": [choice], "prompt_token_ids": prompt}


class _SampledReply:
    """The ids of a conversation up to a reply; those of the reply that it continues are not repeated."""

    def __init__(self, parent: _SampledReply | None, ids: array[int]) -> None:
        self._parent = parent
        self._ids = ids
        self._length = (len(parent) if parent is not None else 0) + len(ids)

    def __len__(self) -> int:
        return self._length

    def list_ids(self) -> list[int]:
        parts: list[array[int]] = []
        reply: _SampledReply | None = self
        while reply is not None:
            parts.append(reply._ids)
            reply = reply._parent
        return [token for part in reversed(parts) for token in part]


class CallBatcher:
    """Wraps a function of a list into a function of one item: items that arrive together form a list.

    The function is plain or `async`, and returns a list of as many results. The items of a policy are calls,
    those of the `sample` of a `TokenPolicy` are prompts. A batch begins `wait` seconds after its first item.
    """

    def __init__(
        self,
        function: Callable[[list[T]], Sequence[R] | Awaitable[Sequence[R]]],
        wait: float = 0.004,
        most: int = 64,
    ) -> None:
        from ..rollout.user_calls import UserCalls

        self.batches = 0
        self._function = function
        self._wait = wait
        self._most = most
        self._calls = UserCalls("batch")
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []  # bound: the client's `calls_at_once`
        self._worker: asyncio.Task[None] | None = None  # awaited by the items: it sets all their futures

    async def __call__(self, item: Any) -> Any:
        result = asyncio.get_running_loop().create_future()
        self._waiting.append((item, result))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await result

    async def _work(self) -> None:
        await asyncio.sleep(self._wait)
        while self._waiting:
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            if batch := [(item, result) for item, result in batch if not result.done()]:
                await self._run_batch(batch)

    async def _run_batch(self, batch: list[tuple[Any, asyncio.Future[Any]]]) -> None:
        self.batches += 1
        try:
            results = await self._calls.call(self._function, [item for item, _ in batch])
            if len(results) != len(batch):
                raise BadInput(f"the function returned {len(results)} results for a batch of {len(batch)}")
        except Exception as error:  # boundary: foreign code; each item raises it  # noqa: BLE001
            for _, waiting in batch:
                if not waiting.done():
                    waiting.set_exception(error)
            return
        for (_, waiting), result in zip(batch, results, strict=True):
            if not waiting.done():
                waiting.set_result(result)


def _digest_history(
    chat: Mapping[str, Any], messages: list[Any], start: bytes | None = None
) -> Iterator[bytes]:
    """Yield a digest of the conversation before the first message, and after each one.

    Replies count by their meaning, since agents send them back in a form of their own.
    """
    from ..dialect import DIALECTS
    from ..dialect.message import digest_message

    digest = start if start is not None else blake3(msgspec.json.encode(chat.get("tools"))).digest(16)
    yield digest
    for message in messages:
        if message.get("role") == "assistant":
            [reply] = DIALECTS["chat"].parse_messages([message])
            content = digest_message(reply)
        else:
            content = msgspec.json.encode(message)
        digest = blake3(digest + content).digest(16)
        yield digest


def _make_message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _make_template_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates expect it: texts as strings, the arguments of calls as objects."""
    shown = {**message, "content": _join_texts(message.get("content"))}
    if message.get("tool_calls"):
        shown["tool_calls"] = [_make_template_call(call) for call in message["tool_calls"]]
    return shown


def _join_texts(content: Any) -> Any:
    parts = content if isinstance(content, list) else []
    if parts and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return "" if content is None else content


def _make_template_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    try:
        arguments = msgspec.json.decode(function.get("arguments") or "{}")
    except msgspec.MsgspecError:
        arguments = function.get("arguments")  # the model wrote no JSON
    return {**call, "function": {**function, "arguments": arguments}}
