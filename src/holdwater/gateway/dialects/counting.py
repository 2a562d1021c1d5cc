"""Questions how many tokens a request has: they are recorded and counted like turns, beside the trajectory.

`relay.py` passes them on to an upstream that can tell; `side.py` estimates where none can.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from ...core.records import Usage
from ..recorder import Form
from . import Asked, Dialect, Place, Stream, Whole


class TokenCount:
    """Implements `Dialect`, for the token counts of requests in another one."""

    def __init__(self, counted: Dialect) -> None:
        self._counted = counted
        name = counted.form.dialect
        self.form: Form = counted.form._replace(dialect=f"{name}_count", of=name, optional=True, beside=True)
        self.keep_alive = counted.keep_alive

    def ask(self, head: dict[str, Raw], place: Place, model: str | None) -> Asked:
        return self._counted.ask(head, place, model)

    def error_body(self, status: int, message: str, code: str | None = None) -> bytes:
        return self._counted.error_body(status, message, code)

    def read_reply(self, body: bytes) -> Whole:
        if not body.isascii():
            body.decode()
        reply = msgspec.json.decode(body, type=_Reply)
        return Whole(Usage(requests=1), reply.error)

    def stream(self, asked: Asked) -> Stream:
        return self._counted.stream(asked)

    def told(self, reply: bytes) -> list[bytes]:
        raise msgspec.ValidationError("token counts are not streamed")


class _Reply(msgspec.Struct):
    error: Any = None
