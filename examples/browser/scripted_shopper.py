"""A model that orders from the shop by a script, so that the example runs without a key.

    python examples/browser/scripted_shopper.py [--browsers 20] [--memory 12GiB]

It reads the text of each page, and checks that a screenshot of the page came with it.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import re
from pathlib import Path
from typing import Any

import holdwater as hw
from holdwater.testing.scripted_model import ScriptedReply, serve_script

HERE = Path(__file__).parent
PNG = b"\x89PNG\r\n\x1a\n"
SIZE = (800, 600)


def answer(request: dict[str, Any]) -> ScriptedReply:
    task, *_ = (message["content"] for message in request["messages"])
    text, image = request["messages"][-1]["content"]
    check_screenshot(image["image_url"]["url"])
    found = re.fullmatch(r"Order the (\w+) (\w+) for (\w+)\..*", task)
    assert found is not None, task
    return ScriptedReply(
        tool_calls=[{"name": "act", "arguments": choose_action(text["text"], *found.groups())}]
    )


def choose_action(page: str, colour: str, ware: str, customer: str) -> dict[str, Any]:
    elements = {name: int(number) for number, name in re.findall(r"\[(\d+)\] (.+)", page)}
    if number := re.search(r"Order number: (\d+)", page):
        return {"answer": number[1]}
    for name in (f"{colour} {ware}", f"{ware}s"):
        if name in elements:
            return {"click": elements[name]}
    if "Your name" in elements:
        return {"click": elements["Your name"], "type": customer}
    return {"click": elements["Send"]}


def check_screenshot(url: str) -> None:
    """Raise an error unless the image is a PNG of a page's size."""
    picture = base64.b64decode(url.removeprefix("data:image/png;base64,"))
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert picture.startswith(PNG) and 0 < width <= SIZE[0] and 0 < height <= SIZE[1], (width, height)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--browsers", type=int, default=20)
    parser.add_argument("--memory", help="the budget of the run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    async with serve_script(answer) as url:
        summary = await hw.arun(
            f"{HERE / 'shop.py'}:suite",
            f"{HERE / 'shop.py'}:shop",
            model="scripted-shopper",
            base_url=url,
            limit=options.browsers,
            concurrency=options.browsers,
            memory=options.memory,
            out=options.out,
        )
    print(f"{summary.outcomes} in `{summary.directory}`")


if __name__ == "__main__":
    asyncio.run(main())
