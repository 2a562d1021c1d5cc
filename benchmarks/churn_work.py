"""The suite of `rollout_churn.py` and its agent, which talks for some turns and keeps its history.

Workers load them as `churn_work.py:suite` and `churn_work.py:talk`. `peer_verifiers.py` does the same work on
verifiers, with the same messages (`said`).
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from typing import Any

from content import image, text

import holdwater as hw


async def talk(instance: hw.Instance, sandbox: object, model: Any) -> int:
    """Talk for some turns, each after a pause; each call sends the whole history, as agents do."""
    pause = instance.data.get("pause", 0.0)
    name = f"{instance.id}/{secrets.token_hex(8)}" if pause else instance.id  # members see other pages
    kind, turns, size = instance.data["kind"], instance.data["turns"], instance.data["size"]
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        if pause:
            await asyncio.sleep(pause)
        messages.append(said(kind, f"{name}/{turn}", size))
        reply = await model.chat(messages)
        messages.append(reply["choices"][0]["message"])
    return len(messages)


def said(kind: str, seed: str, size: int) -> dict[str, Any]:
    """Return one message of the agent; each seed gives another message."""
    if kind == "text":
        return {"role": "user", "content": text(seed, size)}
    picture = base64.b64encode(image(seed, size)).decode()
    parts = [
        {"type": "text", "text": f"Look at {seed}."},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
    ]
    return {"role": "user", "content": parts}


async def agree(instance: hw.Instance, sandbox: object, answer: object) -> bool:
    return True


async def rank(instance: hw.Instance, members: list[Any]) -> list[hw.Grade]:
    return [hw.Grade(passed=True, score=float(member.number)) for member in members]


suite = hw.Suite(name="churn", instances=lambda: (), grade=agree, group=rank)
