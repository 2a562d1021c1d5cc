"""A suite whose agent talks with its model in turns, and writes each reply down when it has it in full.

The constants are INSTANCES, TURNS, TRACE (the file of the replies) and LIMIT (a file with the number of
replies after which the agents wait).
"""

from __future__ import annotations

SUITE = """
import asyncio, json
import aiohttp
import holdwater as hw


def instances():
    return (hw.Instance(id=f"i{n}") for n in range(INSTANCES))


async def solve(instance, sandbox, model):
    # Every second instance streams; what was received in full is written down at once.
    streams = int(instance.id[1:]) % 2 == 1
    messages = [{"role": "user", "content": instance.id}]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.key}"}) as http:
        for _ in range(TURNS):
            request = {"model": model.name, "messages": messages, "stream": streams}
            async with http.post(f"{model.url}/chat/completions", json=request) as response:
                text = said(await response.read(), streams)
            with open(TRACE, "a") as trace:
                trace.write(text + "\\n")
            while len(open(TRACE).readlines()) >= int(open(LIMIT).read()):
                await asyncio.sleep(0.01)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    return text


def said(body, streams):
    if not streams:
        return json.loads(body)["choices"][0]["message"]["content"]
    events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


suite = hw.Suite(name="talking", instances=instances, grade=lambda instance, sandbox, answer: True)
"""
