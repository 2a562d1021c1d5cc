"""The work of rows 1 and 2 as an Inspect AI task. It runs in its own environment; see `peers.py`.

python peer_inspect.py text|images SAMPLES TURNS BYTES URL LOGS
"""

from __future__ import annotations

import base64
import sys
from typing import Any

from content import image, text
from inspect_ai import Task, eval  # type: ignore[import-not-found,unused-ignore]
from inspect_ai.dataset import MemoryDataset, Sample  # type: ignore[import-not-found,unused-ignore]
from inspect_ai.model import (  # type: ignore[import-not-found,unused-ignore]
    ChatMessageUser,
    ContentImage,
    ContentText,
    get_model,
)
from inspect_ai.solver import solver  # type: ignore[import-not-found,unused-ignore]

AT_ONCE = 30


def main(kind: str, count: str, turns: str, size: str, url: str, logs: str) -> int:
    samples = [Sample(input="Talk.", id=f"talk-{number}") for number in range(int(count))]
    task = Task(dataset=MemoryDataset(samples), solver=talk(kind, int(turns), int(size)))
    model = get_model(
        "openai/benchmark", base_url=url, api_key="benchmark", responses_api=False, memoize=False
    )
    done = eval(
        task,
        model=model,
        log_dir=logs,
        display="none",
        max_samples=AT_ONCE,
        max_connections=AT_ONCE,
        log_realtime=False,
    )
    return 0 if done[0].status == "success" else 1


@solver  # type: ignore[untyped-decorator,unused-ignore]
def talk(kind: str, turns: int, size: int) -> Any:
    async def solve(state: Any, generate: Any) -> Any:
        for turn in range(turns):
            state.messages.append(message(kind, f"{state.sample_id}/{turn}", size))
            state = await generate(state)
        return state

    return solve


def message(kind: str, seed: str, size: int) -> Any:
    if kind == "text":
        return ChatMessageUser(content=text(seed, size))
    picture = base64.b64encode(image(seed, size)).decode()
    parts = [ContentText(text=f"Look at {seed}."), ContentImage(image=f"data:image/png;base64,{picture}")]
    return ChatMessageUser(content=parts)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
