"""The scripted model's part in the demo: what a plausible model would reply, turn by turn.

Stateless: the conversation and its `seed` (the attempt's round) say all. It does not get everything right.
The server that speaks these replies is in `testing/scripted.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...testing.scripted import Reply
from .task import Task, names, task

FIRST_RIGHT = {"quoted-commas": 2, "split-the-bill": 2}  # the first round in which the fix is right
NEVER_RIGHT = ("build-order",)

SHORTEST_DELAY, LONGEST_DELAY = 0.1, 0.4  # seconds before a reply

Step = tuple[str, str]  # what the model says, and the command that it runs


class Plan(msgspec.Struct, frozen=True):
    """How the model goes about a task: what it tries before the fix and after it, and its last words."""

    fix: str
    done: str
    looks_around: bool = False
    reproduce: Step | None = None
    verify: Step | None = None


def reply(request: dict[str, Any]) -> Reply:
    """The reply to a Chat Completions request of an agent at work on a demo task."""
    messages = request.get("messages") or []
    found = _asked(messages)
    if found is None:
        return Reply(text="I only know the tasks of the demo suite.")
    turn = sum(message.get("role") == "assistant" for message in messages)
    seed = request.get("seed") or 1
    plan = PLANS.get(found.name, DEFAULT)
    steps = list(_steps(found, plan, seed))
    delay = _delay(f"{found.name} {turn} {seed}")
    if turn >= len(steps):
        return Reply(text=plan.done, delay=delay)
    said, command = steps[turn]
    return Reply(text=said, tool_calls=[{"name": "bash", "arguments": {"command": command}}], delay=delay)


def _asked(messages: Sequence[Mapping[str, Any]]) -> Task | None:
    text = "\n".join(_text(message.get("content")) for message in messages if message.get("role") == "user")
    return next((task(name) for name in names() if task(name).instruction in text), None)


def _text(content: object) -> str:
    """A message's text, which may come in parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _steps(found: Task, plan: Plan, seed: int) -> Iterator[Step]:
    if plan.looks_around:
        yield "I will look around first.", "ls -la"
    shown = " ".join(name for name, content in found.files.items() if content)
    yield "Let me read the code.", f"cat {shown}"
    if plan.reproduce:
        yield plan.reproduce
    yield plan.fix, _fix(found, seed)
    if plan.verify:
        yield plan.verify


def _fix(found: Task, seed: int) -> str:
    right = found.name not in NEVER_RIGHT and seed >= FIRST_RIGHT.get(found.name, 1)
    return found.solution if right or found.wrong is None else found.wrong


def _delay(key: str) -> float:
    """The same for the same key, and different enough that attempts do not run in step."""
    return SHORTEST_DELAY + (LONGEST_DELAY - SHORTEST_DELAY) * (zlib.crc32(key.encode()) % 1000) / 1000


def _python(said: str, *lines: str) -> Step:
    return said, "python3 - <<'EOF'\n" + "\n".join(lines) + "\nEOF"


DEFAULT = Plan(fix="I see the problem; this should fix it.", done="Fixed.")

PLANS: dict[str, Plan] = {
    "pager": Plan(
        fix="The count is rounded down and both ends of the slice are off. I will correct that.",
        verify=_python(
            "Does the last page appear now?",
            "from pager import page, page_count",
            "print(page_count(21, 10), page(list(range(21)), 3, 10))",
        ),
        done="The last page is shown now: the count is rounded up and pages start where they should.",
    ),
    "discount": Plan(
        fix="`and` binds tighter than `or`, and the threshold itself is excluded. One line needs to change.",
        verify=("Let me look at the line.", "grep -n 'if ' shop/discount.py"),
        done="Members from 50.00 on get the discount, nobody else does, and a coupon switches it off.",
    ),
    "shared-tags": Plan(
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
    "slugs": Plan(
        reproduce=_python("Let me see it happen.", "from slugs import slug", "print(slug('Crème brûlée'))"),
        fix="The accents have to be decomposed and dropped before anything else is replaced.",
        verify=_python("Check.", "from slugs import slug", "print(slug('Crème brûlée'), slug('Straße'))"),
        done="Titles are case-folded and stripped of their accents before the hyphens are put in.",
    ),
    "billing-dates": Plan(
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
    "quoted-commas": Plan(
        fix="Splitting at commas cannot work; I will walk along the line and remember open quotes.",
        verify=_python(
            "Try it on the example.",
            "from addresses import fields",
            "print(fields('\"Miller, Anna\",Berlin'))",
        ),
        done="Commas inside quotes stay in their field now.",
    ),
    "lru-order": Plan(
        fix="A dictionary keeps its order of insertion, so using an entry means to put it in again.",
        done="Reading and writing move an entry to the end, and the cache makes room before it adds one.",
    ),
    "split-the-bill": Plan(
        looks_around=True,
        fix="Whole cents, and the rest goes to the first ones.",
        verify=_python("Is a cent missing?", "from bill import split", "print(split('10.00', 3))"),
        done="The shares are whole cents that add up to the bill.",
    ),
    "build-order": Plan(
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
    "backup-names": Plan(
        looks_around=True,
        fix="Everything needs quotes, and the list must come from a glob and not from `ls`.",
        verify=(
            "Try a name with a space.",
            'd=$(mktemp -d) && touch "$d/a b.txt" && sh backup.sh "$d" "$d/out" && ls "$d/out"',
        ),
        done="The script copies any file name, counts correctly and fails with status 2 without a source.",
    ),
    "config-merge": Plan(
        fix="`update` replaces whole objects and changes the defaults; I will merge copies, level by level.",
        verify=_python(
            "Check.",
            "from settings import merge",
            "base = {'editor': {'theme': 'light', 'size': 1}}",
            "print(merge(base, {'editor': {'theme': 'dark'}}), base)",
        ),
        done="Objects are merged at every depth, `null` removes a setting, and the inputs stay as they were.",
    ),
    "spread": Plan(
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
    "two-placeholders": Plan(
        fix="The pattern is greedy, and values are used as patterns. A replacement function avoids both.",
        done="Each placeholder is replaced on its own, unknown names stay, and values go in as they are.",
    ),
    "cli-flags": Plan(
        looks_around=True,
        reproduce=("See it first.", "python3 convert.py a.png --cache false -v -v"),
        fix="`bool('false')` is true; the other options need the right action or type.",
        verify=("Again.", "python3 convert.py a.png --cache false -v -v --scale -1.5 --tag x --tag y"),
        done="The options do what they say now.",
    ),
    "orders-report": Plan(
        fix="The joins multiply rows and drop customers; subqueries and a parameter do neither.",
        done="Every customer is listed once with its own counts, and names are passed as parameters.",
    ),
}
