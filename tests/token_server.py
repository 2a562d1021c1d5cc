"""A model server that returns token ids and keeps a log of every token that it sampled, and agents for it.

For tests of token sequences: each letter is a token, and the tokenizer merges `qu`, so that a text which the
model wrote letter by letter has other ids in a prompt. Each reply is unique.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from aiohttp import web
from tests.server_harness import Model

MERGED = 90_000  # the id of `qu`
END = 0

SUITE = """
import os
from pathlib import Path
import holdwater as hw

HERE = Path(__file__).parent
HISTORIES = ["plain", "branch", "compact", "edit", "again", "quirk", "child", "die", "hold"]


def instances():
    for name in HISTORIES:
        yield hw.Instance(id=name, instruction=name)


async def grade(instance, sandbox, answer):
    return hw.Grade(passed=True, score=1.0)


def user(text):
    return {"role": "user", "content": text}


async def say(model, messages):
    reply = await model.chat(messages)
    message = reply["choices"][0]["message"]
    return [*messages, {"role": "assistant", "content": message["content"]}]


async def helper(instance, sandbox, model):
    talk = await say(model, [user("help " + instance.instruction)])
    await say(model, [*talk, user("more")])


async def solve(instance, sandbox, model, attempt):
    talk = await say(model, [{"role": "system", "content": "sys"}, user(instance.instruction)])
    talk = await say(model, [*talk, user("two")])
    if instance.id == "branch":
        for text in ("left", "right"):
            await say(model, [*talk, user(text)])
    if instance.id == "compact":
        talk = [*talk[:2], user("summary of two turns")]
    if instance.id == "edit":
        talk[-1] = {"role": "assistant", "content": "edited"}
    if instance.id == "again":
        await say(model, talk[:-1])
    if instance.id == "child":
        await attempt.spawn(helper, "first", name="one")
        await attempt.spawn(helper, "second", name="two")
    if instance.id == "die" and not (HERE / "died").exists():
        (HERE / "died").touch()
        os.kill(os.getpid(), 9)
    talk = await say(model, [*talk, user(instance.id + " three")])
    await say(model, [*talk, user("last")])


suite = hw.Suite(name="tokens", instances=instances, grade=grade)
"""


class LoggedSample(NamedTuple):
    """One reply that the server sampled."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


class TokenModel(Model):
    """Implements vLLM's `return_token_ids`; `log` has every reply that left it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[LoggedSample] = []
        self.holds = ""  # a request that says this waits for `gate`

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        texts = [str(message["content"]) for message in body["messages"]]
        if self.holds and texts[-1] == self.holds:
            self.waiting += 1
            try:
                await self.gate.wait()
            finally:
                self.waiting -= 1
        return web.json_response(self._sample(body, "quirk" in texts))

    def _sample(self, body: dict[str, Any], odd: bool) -> dict[str, Any]:
        text = f"{'qu' if odd else 'r'}{len(self.log)}"
        tokens = [*map(ord, text), END]
        prompt = [token for message in body["messages"] for token in _tokenize(message)]
        self.log.append(LoggedSample(tuple(prompt), tuple(tokens)))
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        reply: dict[str, Any] = {"object": "chat.completion", "choices": [choice]}
        if body.get("return_token_ids"):
            reply["prompt_token_ids"], choice["token_ids"] = prompt, tokens
        if body.get("logprobs"):
            content = [{"token": str(token), "logprob": -token / 64} for token in tokens]
            choice["logprobs"] = {"content": content}
        return reply


def _tokenize(message: dict[str, Any]) -> list[int]:
    letters: list[int] = []
    text = str(message["content"])
    if message["role"] != "assistant":
        text = f"<{text}>"
    for letter in map(ord, text):
        if letter == ord("u") and letters and letters[-1] == ord("q"):
            letters[-1] = MERGED
        else:
            letters.append(letter)
    return [*letters, END] if message["role"] == "assistant" else letters
