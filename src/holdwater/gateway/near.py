"""A call from this process: it goes the way of every call, without a connection and copies of its body.

`client.py` makes such calls, for agents in Python; their way is in `relay.py`.
"""

from __future__ import annotations

from aiohttp import web
from multidict import CIMultiDict

from .body import Admitted


class Near:
    """What the relay needs of a request."""

    transport = None
    headers = CIMultiDict({"Accept": "*/*", "Content-Type": "application/json", "User-Agent": "holdwater"})

    def __init__(self, content: bytes, admitted: Admitted) -> None:
        self.size = len(content)
        self._content: bytes | None = content
        self._admitted = admitted

    def taken(self) -> tuple[bytes, Admitted]:
        """Its body, which is whoever takes it's from now on, and what was admitted for it."""
        content, self._content = self._content, None
        assert content is not None, "a body is read once"
        return content, self._admitted


Request = web.BaseRequest | Near
