"""`holdwater search`: finds a text in names, failures, answers and transcripts of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .console import STDOUT, CommandConsole, is_terminal, make_progress_printer
from .flags import Flag

if TYPE_CHECKING:
    from rich.text import Text

    from ..api.searching import RunHit

NO_HITS = 1
UNSEARCHED = 2


def search(text: str, /, *runs: str, index: Flag = False, json: Flag = False) -> int:
    """Find a text in the names, failures, answers and transcripts of runs.

    Case does not matter for the letters A to Z. Hits are printed as they come; Ctrl-C stops the search. The
    exit status is 0 with hits, 1 without, and 2 if a part of a run cannot be searched.

    For example: `holdwater search "No such file"`, or `holdwater search timeout runs/mine --json`.

    Parameters
    ----------
    text
        The text to find, at most 200 characters.
    runs
        Directories of runs, or directories with runs in them (default: `runs/`); `latest` is the newest run.
    index
        First build an index beside each run, or bring it up to date, so that a further search of a large run
        is fast. It can be deleted at any time.
    json
        Print one JSON document a line for each hit.
    """
    from ..api.searching import search_runs

    console = CommandConsole()
    problems: list[str] = []  # bound: a few for each run

    def report(problem: str) -> None:
        problems.append(problem)
        console.say(f"warning: {problem}")

    found = False
    for hit in search_runs(text, runs, report, make_progress_printer(console), index=index):
        found = True
        if json:
            console.write_line(describe_hit(hit))
        elif is_terminal(STDOUT):
            console.write_page(render_hit(hit))
        else:
            console.write_text(render_hit(hit).plain)
    console.flush()
    return UNSEARCHED if problems else 0 if found else NO_HITS


def describe_hit(found: RunHit) -> dict[str, object]:
    hit = found.hit
    place = {name: getattr(hit, name) for name in ("kind", "instance", "sample", "turn", "role")}
    text = {name: getattr(hit, name) for name in ("before", "match", "after")}
    return {"run": str(found.run), **place, "attempt": hit.number, **text}


def render_hit(found: RunHit) -> Text:
    from rich.text import Text

    from ..view.formatting import line

    hit = found.hit
    words = [str(found.run), line(hit.instance)]
    if hit.sample:
        words.append(f"sample {hit.sample}")
    if hit.number is not None and hit.number > 1:
        words.append(f"attempt {hit.number}")
    words.append(f"turn {hit.turn} {hit.role}".rstrip() if hit.turn is not None else hit.kind)
    text = Text(" ".join(words) + ": ", "dim")
    # The bars keep spaces at the ends of a part, which `line` strips.
    for part, style in ((hit.before, ""), (hit.match, "bold red"), (hit.after, "")):
        text.append(line(f"|{part}|")[1:-1], style or "default")
    return text
