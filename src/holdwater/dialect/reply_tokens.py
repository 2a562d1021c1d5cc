"""Token ids and log probabilities in replies: every form in which model servers return them.

vLLM has them beside the message, SGLang in `meta_info`, NeMo in the message. Some servers name the tokens of
the log probabilities `token_id:N`. `gateway/upstreams/token_requests.py` asks for them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from .message import ReplyTokens, as_dict, as_list

LARGEST_ID = (1 << 32) - 1
TokenIds = tuple[Annotated[int, msgspec.Meta(ge=0, le=LARGEST_ID)], ...]
TOKEN_PREFIX = "token_id:"
SAMPLED_FIELD = "output_token_logprobs"  # of SGLang: a list of `[logprob, id, text]`


def parse_tokens(reply: dict[str, Any], choice: dict[str, Any]) -> ReplyTokens:
    """Read the tokens of a reply of any dialect; of dialects without choices, `choice` is the reply itself.

    A missing log probability becomes None, which keeps the positions of the others.
    """
    message = as_dict(choice.get("message"))
    beside = [
        reply,
        choice,
        message,
        *(as_dict(at.get("provider_specific_fields")) for at in (choice, message)),
    ]
    prompt = _find_ids(beside, "prompt_token_ids")
    completion, logprobs = _parse_logprobs(choice)
    if ids := _find_ids(beside, "token_ids"):
        return ReplyTokens(prompt, ids, logprobs)
    if ids := _find_ids(beside, "generation_token_ids"):
        given = next((at["generation_log_probs"] for at in beside if "generation_log_probs" in at), None)
        return ReplyTokens(prompt, ids, tuple(map(_to_logprob, as_list(given))) or logprobs)
    sampled = as_list(as_dict(choice.get("meta_info")).get(SAMPLED_FIELD))
    if sampled and all(isinstance(token, list) and len(token) > 1 for token in sampled):
        ids = _parse_ids([token[1] for token in sampled])
        return ReplyTokens(prompt, ids, tuple(_to_logprob(token[0]) for token in sampled))
    return ReplyTokens(prompt, completion, logprobs)


def _find_ids(beside: list[dict[str, Any]], field: str) -> tuple[int, ...]:
    return next((ids for at in beside if (ids := _parse_ids(at.get(field)))), ())


def _parse_logprobs(choice: dict[str, Any]) -> tuple[tuple[int, ...], tuple[float | None, ...]]:
    """Return the ids and values of the log probabilities; no ids unless all tokens are `token_id:N`."""
    content = [as_dict(token) for token in as_list(as_dict(choice.get("logprobs")).get("content"))]
    names = [str(token.get("token")).removeprefix(TOKEN_PREFIX) for token in content]
    named = all(str(token.get("token")).startswith(TOKEN_PREFIX) for token in content)
    ids = [int(name) for name in names if name.isdecimal()] if named else []
    logprobs = tuple(_to_logprob(token.get("logprob")) for token in content)
    return _parse_ids(ids) if len(ids) == len(content) else (), logprobs


def _to_logprob(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _parse_ids(value: Any) -> tuple[int, ...]:
    """Return token ids; none if any is not an integer of 32 bits."""
    try:
        return msgspec.convert(value, TokenIds)
    except msgspec.ValidationError:
        return ()
