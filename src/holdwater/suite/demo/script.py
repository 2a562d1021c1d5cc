"""The demo's scripted model: returns the replies of a plausible model, turn by turn, with some wrong fixes.

It is stateless: a reply depends only on the conversation and its `seed` (the attempt's round). The server for
these replies is in `testing/scripted_model.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...testing.scripted_model import ScriptedReply
from . import DemoTask, load_task, task_names

FIRST_RIGHT = {"quoted-commas": 2, "split-the-bill": 2}  # the first round in which the model's fix is right
NEVER_RIGHT = ("build-order",)

SHORTEST_DELAY, LONGEST_DELAY = 0.1, 0.4  # seconds before a reply

Step = tuple[str, str]  # the model's text, and the command that it runs


class ScriptedPlan(msgspec.Struct, frozen=True):
    """The script for one task: steps before and after the fix, and the final message."""

    fix: str
    done: str
    looks_around: bool = False
    reproduce: Step | None = None
    verify: Step | None = None


def reply(request: dict[str, Any]) -> ScriptedReply:
    """Return the reply to a Chat Completions request from an agent that works on a demo task."""
    messages = request.get("messages") or []
    found = _find_task(messages)
    if found is None:
        return ScriptedReply(text="I only know the tasks of the demo suite.")
    turn = sum(message.get("role") == "assistant" for message in messages)
    seed = request.get("seed") or 1
    plan = PLANS.get(found.name, DEFAULT)
    steps = list(_steps(found, plan, seed))
    delay = _delay(f"{found.name} {turn} {seed}")
    if turn >= len(steps):
        return ScriptedReply(text=plan.done, delay=delay)
    said, command = steps[turn]
    return ScriptedReply(
        text=said, tool_calls=[{"name": "bash", "arguments": {"command": command}}], delay=delay
    )


def _find_task(messages: Sequence[Mapping[str, Any]]) -> DemoTask | None:
    text = "\n".join(_text(message.get("content")) for message in messages if message.get("role") == "user")
    return next((load_task(name) for name in task_names() if load_task(name).instruction in text), None)


def _text(content: object) -> str:
    """Return a message's text, which may come in parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _steps(found: DemoTask, plan: ScriptedPlan, seed: int) -> Iterator[Step]:
    if plan.looks_around:
        yield "I will look around first.", "ls -la"
    shown = " ".join(name for name, content in found.files.items() if content)
    yield "Let me read the code.", f"cat {shown}"
    if plan.reproduce:
        yield plan.reproduce
    yield plan.fix, _fix(found, seed)
    if plan.verify:
        yield plan.verify


def _fix(found: DemoTask, seed: int) -> str:
    right = found.name not in NEVER_RIGHT and seed >= FIRST_RIGHT.get(found.name, 1)
    return found.solution if right or found.wrong is None else found.wrong


def _delay(key: str) -> float:
    """Return the same delay for the same key; delays differ, so that attempts do not run in lockstep."""
    return SHORTEST_DELAY + (LONGEST_DELAY - SHORTEST_DELAY) * (zlib.crc32(key.encode()) % 1000) / 1000


def _python(said: str, *lines: str) -> Step:
    return said, "python3 - <<'EOF'\n" + "\n".join(lines) + "\nEOF"


DEFAULT = ScriptedPlan(fix="I see the problem; this should fix it.", done="Fixed.")

PLANS: dict[str, ScriptedPlan] = {
    "pager": ScriptedPlan(
        fix="The count is rounded down and both ends of the slice are off. I will correct that.",
        verify=_python(
            "Does the last page appear now?",
            "from pager import page, page_count",
            "print(page_count(21, 10), page(list(range(21)), 3, 10))",
        ),
        done="The last page is shown now: the count is rounded up and pages start where they should.",
    ),
    "discount": ScriptedPlan(
        fix="`and` binds tighter than `or`, and the threshold itself is excluded. One line needs to change.",
        verify=("Let me look at the line.", "grep -n 'if ' shop/discount.py"),
        done="Members from 50.00 on get the discount, nobody else does, and a coupon switches it off.",
    ),
    "shared-tags": ScriptedPlan(
        looks_around=True,
        reproduce=_python(
            "I suspect the default arguments.",
            "from notes import Note",
            "Note('a').tag('red')",
            "print(Note('b').tags)",
        ),
        fix="Confirmed: a default list is made once and shared by all notes.",
        verify=_python("And now?", "from notes import Note", "Note('a').tag('red')", "print(Note('b').tags)"),
        done="Each note has a list and a dictionary of its own now, copied from what it is given.",
    ),
    "slugs": ScriptedPlan(
        reproduce=_python("Let me see it happen.", "from slugs import slug", "print(slug('Crème brûlée'))"),
        fix="The accents have to be decomposed and dropped before anything else is replaced.",
        verify=_python("Check.", "from slugs import slug", "print(slug('Crème brûlée'), slug('Straße'))"),
        done="Titles are case-folded and stripped of their accents before the hyphens are put in.",
    ),
    "billing-dates": ScriptedPlan(
        looks_around=True,
        fix="I will count in months since year 0, and clamp the day to the month's length.",
        verify=_python(
            "Check the end of January and December.",
            "from datetime import date",
            "from billing import add_months, schedule",
            "print(add_months(date(2023, 11, 15), 1), *schedule(date(2024, 1, 31), 4))",
        ),
        done="`add_months` uses the last day of shorter months, and a schedule counts from its start.",
    ),
    "quoted-commas": ScriptedPlan(
        fix="Splitting at commas cannot work; I will walk along the line and remember open quotes.",
        verify=_python(
            "Try it on the example.",
            "from addresses import fields",
            "print(fields('\"Miller, Anna\",Berlin'))",
        ),
        done="Commas inside quotes stay in their field now.",
    ),
    "lru-order": ScriptedPlan(
        fix="A dictionary keeps its order of insertion, so using an entry means to put it in again.",
        done="Reading and writing move an entry to the end, and the cache makes room before it adds one.",
    ),
    "split-the-bill": ScriptedPlan(
        looks_around=True,
        fix="Whole cents, and the rest goes to the first ones.",
        verify=_python("Is a cent missing?", "from bill import split", "print(split('10.00', 3))"),
        done="The shares are whole cents that add up to the bill.",
    ),
    "build-order": ScriptedPlan(
        fix="I will pass the way that led to a package along, and stop when a package is on it already.",
        verify=_python(
            "Try the cycle from the report.",
            "from build import CycleError, order",
            "try:",
            "    order({'auth': ['users'], 'users': ['auth']})",
            "except CycleError as error:",
            "    print(error)",
        ),
        done="A cycle raises `CycleError` with the packages in it.",
    ),
    "backup-names": ScriptedPlan(
        looks_around=True,
        fix="Everything needs quotes, and the list must come from a glob and not from `ls`.",
        verify=(
            "Try a name with a space.",
            'd=$(mktemp -d) && touch "$d/a b.txt" && sh backup.sh "$d" "$d/out" && ls "$d/out"',
        ),
        done="The script copies any file name, counts correctly and fails with status 2 without a source.",
    ),
    "config-merge": ScriptedPlan(
        fix="`update` replaces whole objects and changes the defaults; I will merge copies, level by level.",
        verify=_python(
            "Check.",
            "from settings import merge",
            "base = {'editor': {'theme': 'light', 'size': 1}}",
            "print(merge(base, {'editor': {'theme': 'dark'}}), base)",
        ),
        done="Objects are merged at every depth, `null` removes a setting, and the inputs stay as they were.",
    ),
    "spread": ScriptedPlan(
        reproduce=_python(
            "A generator is used up after the first pass.",
            "from figures import summary",
            "try:",
            "    print(summary(float(n) for n in (1, 3)))",
            "except Exception as error:",
            "    print(repr(error))",
        ),
        fix="One pass, with the update that stays precise for large numbers.",
        verify=_python("And now?", "from figures import summary", "print(summary(float(n) for n in (1, 3)))"),
        done="`summary` goes over the values once and keeps none of them.",
    ),
    "two-placeholders": ScriptedPlan(
        fix="The pattern is greedy, and values are used as patterns. A replacement function avoids both.",
        done="Each placeholder is replaced on its own, unknown names stay, and values go in as they are.",
    ),
    "cli-flags": ScriptedPlan(
        looks_around=True,
        reproduce=("See it first.", "python3 convert.py a.png --cache false -v -v"),
        fix="`bool('false')` is true; the other options need the right action or type.",
        verify=("Again.", "python3 convert.py a.png --cache false -v -v --scale -1.5 --tag x --tag y"),
        done="The options do what they say now.",
    ),
    "orders-report": ScriptedPlan(
        fix="The joins multiply rows and drop customers; subqueries and a parameter do neither.",
        done="Every customer is listed once with its own counts, and names are passed as parameters.",
    ),
}
