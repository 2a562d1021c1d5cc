"""The suite of the benchmarks and its Python agent, which talks for `TURNS` turns and keeps its history.

Workers load them as `work.py:suite` and `work.py:talk`. The agent that is a command is `talker.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from content import text

import holdwater as hw

TURNS = 45
SAID = 8_000  # bytes of the agent's message in each turn
REPLIED = 2_000  # bytes of the model's reply
MOST = 1_000_000  # `--limit` selects how many run


def instances() -> Iterator[hw.Instance]:
    return (hw.Instance(id=f"talk-{number}", instruction="Talk.") for number in range(MOST))


async def agree(instance: hw.Instance, sandbox: object, answer: object) -> bool:
    return True


async def talk(instance: hw.Instance, sandbox: object, model: Any) -> int:
    """Make `TURNS` calls; each sends the whole history, as agents do."""
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": text(f"{instance.id}/{turn}", SAID)})
        reply = await model.chat(messages)
        messages.append(reply["choices"][0]["message"])
    return len(messages)


suite = hw.Suite(name="talk", instances=instances, grade=agree)
