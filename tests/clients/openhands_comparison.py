"""Compares our export of conversations with what OpenHands' SDK itself keeps of them, in one process.

Its agent, with its own tools, works on instances of a run; afterwards its critics judge its events and ours.
Arguments: an empty directory. Prints what both sides say, as JSON.
"""

import asyncio
import json
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openhands.sdk import LLM, Agent, Conversation, Event
from openhands.sdk.conversation.conversation_stats import ConversationStats
from openhands.sdk.conversation.event_store import EventLog
from openhands.sdk.conversation.state import ConversationState
from openhands.sdk.critic import AgentFinishedCritic, EmptyPatchCritic
from openhands.sdk.event import ActionEvent, LLMConvertibleEvent, ObservationEvent
from openhands.sdk.io import LocalFileStore
from openhands.sdk.llm import content_to_str
from openhands.tools.preset.default import get_default_tools
from pydantic import SecretStr, TypeAdapter

import holdwater as hw
from holdwater.testing.scripted_model import ScriptedReply, serve_script

PATCH = "diff --git a/a.py b/a.py\n"
EVENTS = TypeAdapter(list[Event])


def call(name: str, **arguments: Any) -> ScriptedReply:
    return ScriptedReply(text=f"I use {name}.", tool_calls=[{"name": name, "arguments": arguments}])


EDIT = call("file_editor", command="create", path="{place}/a.py", file_text="x = 1\n", security_risk="LOW")
SHELL = call("terminal", command="cat a.py; ls missing", summary="looking at the file")
TASKS = call("task_tracker", command="plan", task_list=[{"title": "fix it", "status": "todo"}])
FINISH = call("finish", message="fixed")
STORIES: dict[str, tuple[str, list[ScriptedReply]]] = {  # instance -> its patch, and the model's replies
    "finished": (PATCH, [call("think", thought="hm"), EDIT, SHELL, TASKS, FINISH]),
    "unchanged": ("", [SHELL, FINISH]),
    "silent": (PATCH, [EDIT, ScriptedReply(text="I have nothing to add.")]),
    "refused": (
        PATCH,
        [EDIT, call("finish", note="no message"), call("nothing", x=1), ScriptedReply(text="?")],
    ),
    "viewed": (PATCH, [call("file_editor", command="view", path="/nowhere"), FINISH]),
}
OWN: dict[str, dict[str, Any]] = {}


def work(instance: hw.Instance, sandbox: Any, model: Any) -> None:
    llm = LLM(
        model=f"openai/{model.name}",
        base_url=model.url,
        api_key=SecretStr(model.key),
        usage_id="agent",
        input_cost_per_token=3e-6,
        output_cost_per_token=15e-6,
        num_retries=0,
    )
    with tempfile.TemporaryDirectory() as place:
        agent = Agent(
            llm=llm, tools=get_default_tools(enable_browser=False), system_prompt_kwargs={"cli_mode": True}
        )
        conversation = Conversation(agent=agent, workspace=place, visualizer=None)
        conversation.send_message(f"story {instance.id} in {place}")
        conversation.run()
        OWN[instance.id] = {
            "history": [event.model_dump(mode="json") for event in conversation.state.events],
            "cost": conversation.conversation_stats.get_combined_metrics().accumulated_cost,
        }
        conversation.close()


def reply(request: dict[str, Any]) -> ScriptedReply:
    messages = request["messages"]
    first = next(m for m in messages if m["role"] == "user")["content"]
    text = first if isinstance(first, str) else first[0]["text"]
    _, story, _, place = text.split()[:4]
    turn = sum(message["role"] == "assistant" for message in messages)
    answer = STORIES[story][1][turn]
    calls = json.loads(json.dumps(list(answer.tool_calls)).replace("{place}", place))
    return ScriptedReply(text=answer.text, tool_calls=[{**c, "id": f"call_{turn}"} for c in calls])


def describe(events: Sequence[Event]) -> list[list[Any]]:
    """The class of each event, and of its action or observation."""
    inner = [getattr(event, "action", None) or getattr(event, "observation", None) for event in events]
    return [[type(event).__name__, type(found).__name__] for event, found in zip(events, inner, strict=True)]


def render(events: Sequence[Event]) -> list[Any]:
    """The conversation as the SDK would send it to a model."""
    spoken = [event for event in events if isinstance(event, LLMConvertibleEvent)]
    return [
        [
            message.role,
            "".join(content_to_str(message.content)),
            [[tool.name, json.loads(tool.arguments)] for tool in message.tool_calls or ()],
        ]
        for message in LLMConvertibleEvent.events_to_messages(spoken)
    ]


def judge(events: Sequence[Event], patch: str) -> list[bool]:
    spoken = [event for event in events if isinstance(event, LLMConvertibleEvent)]
    return [critic.evaluate(spoken, patch).success for critic in (AgentFinishedCritic(), EmptyPatchCritic())]


def find_details(events: Sequence[Event]) -> list[Any]:
    """What the SDK's own classes keep beside the text: of commands, edits and plans."""
    found: list[Any] = []
    for event in events:
        if isinstance(event, ActionEvent):
            found.append([event.summary, event.action and event.action.model_dump(mode="json")])
        elif isinstance(event, ObservationEvent):
            seen = event.observation.model_dump(mode="json")
            metadata = seen.get("metadata") or {}
            found.append(
                [
                    seen["is_error"],
                    seen.get("command"),
                    seen.get("exit_code"),
                    metadata.get("working_dir"),
                    seen.get("path"),
                ]
            )
    return found


def read_archive(path: Path, into: Path) -> dict[str, Any]:
    with tarfile.open(path, mode="r:gz") as archive:
        archive.extractall(into, filter="data")
    (state,) = into.glob("workspace/conversations/*/base_state.json")
    base = json.loads(state.read_text())
    events = list(EventLog(LocalFileStore(str(state.parent))))
    loaded = ConversationState.model_validate(base)
    metrics = ConversationStats.model_validate(base["stats"]).get_combined_metrics()
    return {"kinds": describe(events), "cost": metrics.accumulated_cost, "status": loaded.execution_status}


def main() -> None:
    place = Path(sys.argv[1])
    suite = hw.Suite(
        name="stories",
        instances=lambda: (hw.Instance(id=name) for name in STORIES),
        grade=lambda instance, sandbox, answer: True,
        patch=lambda instance, sandbox, answer: STORIES[instance.id][0],
    )
    (place / "prices.toml").write_text("[storyteller]\ninput = 3.0\noutput = 15.0\n")

    async def play() -> None:
        async with serve_script(reply) as url:
            await hw.arun(
                suite,
                work,
                out=place / "run",
                model="storyteller",
                base_url=url,
                workers=0,
                prices=str(place / "prices.toml"),
                concurrency=len(STORIES),
            )

    asyncio.run(play())
    hw.export(place / "run", place / "out", format="openhands")
    rows = [json.loads(line) for line in (place / "out" / "output.jsonl").read_text().splitlines()]
    report: dict[str, Any] = {}
    for row in rows:
        name, ours = row["instance_id"], EVENTS.validate_python(row["history"])
        own = EVENTS.validate_python(OWN[name]["history"])
        patch = row["test_result"]["git_patch"]
        both = {"own": own, "ours": ours}
        report[name] = {
            "verdicts": {side: judge(events, patch) for side, events in both.items()},
            "kinds": {side: describe(events) for side, events in both.items()},
            "messages": {side: render(events) for side, events in both.items()},
            "details": {side: find_details(events) for side, events in both.items()},
            "costs": {"own": OWN[name]["cost"], "ours": row["metrics"]["accumulated_cost"]},
            "archive": read_archive(place / "out" / "conversations" / f"{name}.tar.gz", place / name),
        }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
