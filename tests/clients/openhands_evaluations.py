"""Runs the stand-in evaluation on holdwater, in one process, with a scripted model.

Arguments: an empty directory, and the kinds of instances. Prints outcomes and rows as JSON.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "openhands_benchmarks"))

import holdwater as hw
from holdwater.testing.scripted_model import ScriptedReply, serve_script

SPEC = "openhands:benchmarks.notes.run_infer:NotesEvaluation"


def call(name: str, **arguments: Any) -> ScriptedReply:
    return ScriptedReply(tool_calls=[{"name": name, "arguments": arguments}])


WRITE = call("terminal", command="cd {place} && echo two >>notes.txt && pwd")
EDIT = call("file_editor", command="str_replace", path="{place}/notes.txt", old_str="two", new_str="three")
FINISH = call("finish", message="noted")
STORIES = {  # the beginning of an instance's id -> the model's replies
    "finish": [WRITE, EDIT, FINISH],
    "silent": [WRITE, ScriptedReply(text="That is all.")],
    "empty": [FINISH],
    "raise": [WRITE, FINISH],
    "error": [WRITE, FINISH],
    "model": [WRITE, ScriptedReply(status=400, text="no")],
}


def reply(request: dict[str, Any]) -> ScriptedReply:
    messages = request["messages"]
    first = next(m for m in messages if m["role"] == "user")["content"]
    text = first if isinstance(first, str) else first[0]["text"]
    _, story, _, place = text.split()[:4]
    turn = sum(message["role"] == "assistant" for message in messages)
    answer = STORIES[story.partition("-")[0]][turn]
    if answer.status != 200:
        return answer
    calls = json.loads(json.dumps(list(answer.tool_calls)).replace("{place}", place))
    return ScriptedReply(text=answer.text, tool_calls=[{**c, "id": f"call_{turn}"} for c in calls])


async def play(place: Path, kinds: list[str]) -> None:
    details = json.dumps({"kinds": kinds})
    async with serve_script(reply) as url:
        await hw.arun(
            f'{SPEC}?details={details}&env_setup_commands=["export A=1"]',
            out=place / "run",
            model="storyteller",
            base_url=url,
            workers=0,
            retries=1,
            backoff=0.01,
        )


def refuse_tools(names: list[str]) -> str:
    """The error for an agent with these tools; empty: they act in a sandbox."""
    from openhands.sdk import LLM, Agent, Tool

    from holdwater.agent.openhands.evaluation_workspace import place_tools

    try:
        place_tools(Agent(llm=LLM(model="openai/x"), tools=[Tool(name=name) for name in names]))
    except hw.HoldwaterError as error:
        return error.message
    return ""


def main() -> None:
    place, *kinds = sys.argv[1:]
    asyncio.run(play(Path(place), kinds))
    out = Path(place) / "out"
    hw.export(Path(place) / "run", out, format="openhands")
    lines = (out / "output.jsonl").read_text() + (out / "output_errors.jsonl").read_text()
    report = {
        "refused": [refuse_tools(["terminal", "task_tool_set"]), refuse_tools(["terminal", "file_editor"])],
        "rows": {row["instance_id"]: row for row in map(json.loads, lines.splitlines())},
        "metadata": json.loads((out / "metadata.json").read_text()),
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
