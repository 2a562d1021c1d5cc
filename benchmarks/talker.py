"""The agent that is a command: talks for some turns, with text or an image in each, and keeps its history.

    python3 talker.py {id} {model_url} {model_key} {model} text|images TURNS BYTES

It uses only the standard library. The history is kept encoded, so that a turn costs this process little.
"""

from __future__ import annotations

import base64
import http.client
import json
import sys
from urllib.parse import urlsplit

from content import image, text


def main(name: str, url: str, key: str, model: str, *what: str) -> None:
    kind, turns, size = what[0], int(what[1]), int(what[2])
    gateway = urlsplit(url)
    connection = http.client.HTTPConnection(gateway.hostname or "", gateway.port, timeout=600)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    opening = b'{"model": %s, "messages": [' % json.dumps(model).encode()
    history: list[bytes] = []
    for turn in range(turns):
        history.append(message(kind, f"{name}/{turn}", size))
        connection.request("POST", f"{gateway.path}/chat/completions", body(opening, history), headers)
        response = connection.getresponse()
        reply = response.read()
        if response.status != 200:
            raise SystemExit(f"status {response.status}: {reply[:500].decode(errors='replace')}")
        history.append(json.dumps(json.loads(reply)["choices"][0]["message"]).encode())


def message(kind: str, seed: str, size: int) -> bytes:
    if kind == "text":
        return json.dumps({"role": "user", "content": text(seed, size)}).encode()
    picture = base64.b64encode(image(seed, size)).decode()
    parts = [
        {"type": "text", "text": f"Look at {seed}."},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
    ]
    return json.dumps({"role": "user", "content": parts}).encode()


def body(opening: bytes, history: list[bytes]) -> bytes:
    return b"".join((opening, b", ".join(history), b"]}"))


if __name__ == "__main__":
    main(*sys.argv[1:])
