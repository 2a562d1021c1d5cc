"""The dialects in which models are called, each in a module of its own, and the table of them all.

A dialect knows where its requests hold the messages, how its replies and streams are read and rendered, and
how both convert to and from Chat Completions. This room does no I/O.
"""

from __future__ import annotations

from functools import lru_cache

from ..core.environment import JUDGE_KEY, SANDBOX_TOKEN, SERVE_KEYS
from ..core.errors import LedgerCorrupt
from .chat import ChatDialect
from .completions import CompletionsDialect, EmbeddingsDialect
from .gemini import GeminiDialect
from .interface import Dialect, ProviderVariables
from .messages import MessagesDialect
from .responses import ResponsesDialect
from .token_counts import TokenCountDialect

__all__ = [
    "CHAT",
    "DIALECTS",
    "find_dialect",
    "has_conversations",
    "list_conversations",
    "list_key_variables",
    "list_providers",
    "list_server_dialects",
    "make_counter",
]

CHAT = ChatDialect()
DIALECTS: dict[str, Dialect] = {
    "chat": CHAT,
    "responses": ResponsesDialect(),
    "messages": MessagesDialect(),
    "gemini": GeminiDialect(),
    "completions": CompletionsDialect(),
    "embeddings": EmbeddingsDialect(),
}
_COUNT = "_count"


def find_dialect(name: str) -> Dialect:
    """Return the dialect of a recorded exchange."""
    if name in DIALECTS:
        return DIALECTS[name]
    if (counted := name.removesuffix(_COUNT)) != name and counted in DIALECTS:
        return make_counter(DIALECTS[counted])
    message = f"an exchange is in an unknown dialect: `{name}`"
    raise LedgerCorrupt(message, "was it made by a newer version?")


@lru_cache(maxsize=32)
def make_counter(dialect: Dialect) -> Dialect:
    """Return the dialect of the token counts of requests in `dialect`."""
    return TokenCountDialect(dialect)


def list_conversations() -> frozenset[str]:
    """Return the names of the dialects in which calls are turns of a conversation."""
    return frozenset(name for name, dialect in DIALECTS.items() if not dialect.auxiliary)


def list_server_dialects(name: str) -> frozenset[str]:
    """Return what a server of one dialect understands; those of Chat Completions take plain calls as well."""
    plain = {other for other, dialect in DIALECTS.items() if dialect.auxiliary and name == CHAT.name}
    return frozenset({name, *plain})


def has_conversations(name: str) -> bool:
    """Return whether calls in this dialect are turns; other calls are not part of the trajectory."""
    return not (DIALECTS[name].auxiliary if name in DIALECTS else name.endswith(_COUNT))


def list_providers() -> list[ProviderVariables]:
    """Return each provider once, in the order of its dialects."""
    return list(dict.fromkeys(dialect.provider for dialect in DIALECTS.values()))


def list_key_variables() -> frozenset[str]:
    """Return the variables that hold keys: only the conductor has them, and no other process gets them."""
    names = {name for provider in list_providers() for name in (*provider.keys, provider.bearer) if name}
    return frozenset({*names, JUDGE_KEY, SERVE_KEYS, SANDBOX_TOKEN})
