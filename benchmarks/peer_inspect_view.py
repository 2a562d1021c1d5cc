"""Writes the conversations of `view.py --peers` as `.eval` logs, with Inspect AI's own writer.

    python peer_inspect_view.py DIRECTORY SHAPES

It runs in Inspect's environment. SHAPES is JSON: for each log its name, samples, turns and size of a message.
A log has the messages alone, without the events that Inspect writes beside them: it is smaller than usual.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from inspect_ai.log import (  # type: ignore[import-not-found,unused-ignore]
    EvalConfig,
    EvalDataset,
    EvalLog,
    EvalSample,
    EvalSpec,
    write_eval_log,
)
from inspect_ai.model import (  # type: ignore[import-not-found,unused-ignore]
    ChatMessageAssistant,
    ChatMessageUser,
    ModelOutput,
)
from inspect_ai.scorer import Score  # type: ignore[import-not-found,unused-ignore]


def main(directory: str, shapes: str) -> None:
    for name, samples, turns, size in json.loads(shapes):
        write_log(Path(directory) / f"{name}.eval", name, samples, turns, size)


def write_log(path: Path, name: str, samples: int, turns: int, size: int) -> None:
    dataset = EvalDataset(name=name, samples=samples)
    spec = EvalSpec(
        created="2026-01-01T00:00:00+00:00", task=name, dataset=dataset, model="m", config=EvalConfig()
    )
    made = [make_sample(f"{name}-{number:04d}", turns, size) for number in range(samples)]
    log = EvalLog(status="success", eval=spec, samples=made)
    write_eval_log(log, str(path))


def make_sample(name: str, turns: int, size: int) -> Any:
    messages: list[Any] = []
    for number in range(1, turns + 1):
        messages.append(ChatMessageUser(content=f"question {number} " + "x" * size))
        messages.append(ChatMessageAssistant(content=f"answer {number}"))
    return EvalSample(
        id=name,
        epoch=1,
        input=messages[0].content,
        target="",
        messages=messages,
        output=ModelOutput.from_content("m", f"answer {turns}"),
        scores={"made": Score(value=1)},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
