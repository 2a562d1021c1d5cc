"""What a conversation with images costs on disk: each image once, each message once, compressed."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from tests.dialect_requests import DIALECTS
from tests.live.test_gateway_replay import place

from holdwater.testing.scripted_model import ScriptedReply, serve_script

WORDS = "what is to be seen here, and what is to be done about it? " * 20


def seen(dialect: str, picture: bytes) -> Any:
    """A message with a picture."""
    data = base64.b64encode(picture).decode()
    if dialect == "gemini":
        parts = [{"text": WORDS}, {"inlineData": {"mimeType": "image/png", "data": data}}]
        return {"role": "user", "parts": parts}
    if dialect == "messages":
        source = {"type": "base64", "media_type": "image/png", "data": data}
        return {
            "role": "user",
            "content": [{"type": "text", "text": WORDS}, {"type": "image", "source": source}],
        }
    url = f"data:image/png;base64,{data}"
    if dialect == "responses":
        content = [{"type": "input_text", "text": WORDS}, {"type": "input_image", "image_url": url}]
    else:
        content = [{"type": "text", "text": WORDS}, {"type": "image_url", "image_url": {"url": url}}]
    return {"role": "user", "content": content}


PATHS = {
    "chat": ("/v1/chat/completions", "messages"),
    "responses": ("/v1/responses", "input"),
    "messages": ("/v1/messages", "messages"),
    "gemini": ("/v1beta/models/m:generateContent", "contents"),
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("turns", "size"),
    [(12, 20_000), pytest.param(45, 150_000, marks=pytest.mark.proof)],
)
async def test_repeated_content_is_stored_once(tmp_path: Path, dialect: str, turns: int, size: int) -> None:
    path, key = PATHS[dialect]
    messages: list[Any] = []
    texts, pictures = b"", 0
    async with (
        serve_script(lambda request: ScriptedReply(text="I see")) as upstream,
        place(tmp_path, upstream) as p,
        p.attempt(1) as scene,
    ):
        headers = {"Authorization": f"Bearer {scene.session.key}"}
        url = scene.gateway.url.removesuffix("/v1") + path
        for _ in range(turns):
            picture = os.urandom(size)
            messages.append(seen(dialect, picture))
            texts += msgspec.json.encode(messages[-1]).replace(base64.b64encode(picture), b"")
            pictures += size
            body = msgspec.json.encode({"model": "m", "max_tokens": 9, key: messages})
            async with scene.http.post(url, data=io.BytesIO(body), headers=headers) as response:
                assert response.status == 200, await response.read()

    unique = pictures + len(zstandard.compress(texts))
    used = sum(f.stat().st_size for f in p.directory.path.rglob("*") if f.is_file())
    assert pictures < used <= 1.2 * unique
