"""OpenAI calls that are not conversations: text completions and embeddings.

They are recorded and counted like turns, but are not part of the trajectory. The other dialects handle
conversations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from .interface import AdaptedRequest, RequestTarget
from .message import CommonMessage, ModelReply, as_dict, as_list, as_string, render_unknown
from .openai import ChoiceStream, OpenAIDialect, request_usage
from .reply_tokens import parse_tokens
from .sse import NULL, decode_values, is_given, join_values, render_event, to_objects


class PromptDialect(OpenAIDialect):
    """A dialect whose requests have one prompt.

    A prompt is one or more texts or token ids: it stays in the head, and no request continues another.
    """

    optional = True
    auxiliary = True

    def parse_message(self, item: dict[str, Any]) -> Iterator[CommonMessage]:
        return iter(())

    def parse_system(self, head: dict[str, Any]) -> Iterator[CommonMessage]:
        """Yield the prompt, or the texts to embed, as one message; token ids are rendered as JSON."""
        given = head.get("prompt", head.get("input"))
        texts = given if isinstance(given, list) and all(isinstance(text, str) for text in given) else [given]
        parts = tuple(
            text if isinstance(text, str) else render_unknown(text) for text in texts if text is not None
        )
        if parts:
            yield CommonMessage(role="user", parts=parts)


class CompletionsDialect(PromptDialect):
    """A stream reports its usage only on request, as in Chat Completions."""

    name = path = "completions"

    def adapt_request(self, head: dict[str, Raw], place: RequestTarget, model: str | None) -> AdaptedRequest:
        return request_usage(head, place, model)

    def stream(self, asked: AdaptedRequest) -> CompletionStream:
        return CompletionStream(asked.wants_usage)

    def render_stream(self, reply: bytes) -> list[bytes]:
        """Return one chunk per choice, then the usage: a chunk has the form of a reply."""
        whole = decode_values(reply)
        parts: list[dict[str, Any]] = [
            {"choices": [choice]} for choice in to_objects(whole.pop("choices", NULL))
        ]
        last = [field for field in ("usage", "error") if is_given(whole, field)]
        parts += [{"choices": [], field: whole.pop(field)} for field in last]
        return [*(render_event({**whole, **part}) for part in parts), b"data: [DONE]\n\n"]

    def parse_reply(self, reply: dict[str, Any]) -> ModelReply:
        choices = [as_dict(choice) for choice in as_list(reply.get("choices"))]
        said = [CommonMessage(role="assistant", parts=(as_string(choice.get("text")),)) for choice in choices]
        first = choices[0] if choices else {}
        prompt = first.get("prompt_token_ids", reply.get("prompt_token_ids"))
        logprobs = as_list(as_dict(first.get("logprobs")).get("token_logprobs"))
        given = [{"logprob": logprob} for logprob in logprobs]  # as in Chat Completions
        return ModelReply(
            message=said[0] if said else None,
            others=tuple(said[1:]),
            finish=as_string(first.get("finish_reason")),
            model=as_string(reply.get("model")),
            tokens=parse_tokens({"prompt_token_ids": prompt}, {**first, "logprobs": {"content": given}}),
        )


class EmbeddingsDialect(PromptDialect):
    """The request keeps its own model: the run's model makes no embeddings."""

    name = path = "embeddings"
    uses_run_model = False

    def adapt_request(self, head: dict[str, Raw], place: RequestTarget, model: str | None) -> AdaptedRequest:
        return AdaptedRequest(place, {})

    def impose_sampling(self, head: Mapping[str, Raw], sampling: Mapping[str, Any]) -> dict[str, Raw]:
        return {}

    def stream(self, asked: AdaptedRequest) -> CompletionStream:
        return CompletionStream(wants_usage=True)

    def render_stream(self, reply: bytes) -> list[bytes]:
        raise msgspec.ValidationError("embeddings are not streamed")

    def parse_reply(self, reply: dict[str, Any]) -> ModelReply:
        found = [as_dict(one) for one in as_list(reply.get("data"))]
        model = as_string(reply.get("model"))
        if not found:
            return ModelReply(model=model)
        noun = "embedding" if len(found) == 1 else "embeddings"
        size = len(as_list(found[0].get("embedding")))
        text = f"[{len(found)} {noun}{f' of {size} numbers' if size else ''}]"
        return ModelReply(message=CommonMessage(role="assistant", parts=(text,)), model=model)


class CompletionStream(ChoiceStream):
    """Assembles a text per choice."""

    def __init__(self, wants_usage: bool) -> None:
        super().__init__(wants_usage)
        self._choices: dict[int, dict[str, Any]] = {}
        self._texts: dict[int, list[str]] = {}

    def _take_choice(self, index: int, choice: dict[str, Any]) -> None:
        self._texts.setdefault(index, []).append(choice.pop("text", None) or "")
        known = self._choices.setdefault(index, {})
        for field, value in choice.items():
            known[field] = value if isinstance(value, str | int) else join_values(known.get(field), value)

    def _assemble(self) -> list[dict[str, Any]]:
        texts = {index: "".join(pieces) for index, pieces in self._texts.items()}
        return [{**self._choices[index], "text": texts[index]} for index in sorted(texts)]
