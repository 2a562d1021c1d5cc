"""The command: finds the verb, runs it, and turns what it raises into a message and an exit status.

One file a verb. A verb's rooms are imported when that verb is called, so that `holdwater --help` is instant.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..run.keys import take_keys
from ..run.signals import INTERRUPTED, Signals
from ..version import __version__
from .console import Console, occupy_standard_fds

VERBS = {
    "run": "Run a suite with an agent",
    "serve": "Serve rollouts to trainers: what runs is what clients order",
    "resume": "Go on with a run that was stopped or killed",
    "show": "Show what became of a run, or of one instance",
    "transcript": "Print the conversation of an attempt",
    "audit": "Prove that nothing is missing from a run",
    "export": "Write a run's outcomes, attempts, exchanges or trajectories",
    "replay": "Run a run again with its recorded replies, without a model",
    "grade": "Grade predictions that someone made",
    "regrade": "Grade a run's work again without running the agent",
    "check": "Run oracle and nop on every instance of a suite, and name those that are wrong",
    "init": "Write a suite or an agent to begin with, and its test",
    "images": "Plan, build, show and audit the images that sandboxes start from",
    "prune": "Make old runs smaller, or remove them; says first what would go",
    "suites": "List the suites that are known here",
    "agents": "List the agents that are known here",
    "doctor": "Say what this machine gives, and what is weaker for it",
    "help": "Read a page of the manual: `holdwater help TOPIC`",
    "version": "Print the version of holdwater",
}
BROKEN_PIPE = 141  # what a shell reports for SIGPIPE: the reader left, nothing is wrong


def command() -> int:
    """Be the command of this process, signals included; its exit status."""
    status = INTERRUPTED
    try:
        take_keys()
        with Signals():
            status = main(sys.argv[1:])
    except KeyboardInterrupt:
        pass  # in a moment around `main`
    # Python exits by SIGINT if a `KeyboardInterrupt` ever left code that was executed from a string, as some
    # imports do, although it was caught later. Other code from a string makes it forget that.
    exec("")
    Signals.ignore()
    return status


# Types as usage errors name them -> what people write there.
EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "int|Literal[auto]|None": "a whole number or `auto`",
}


def main(argv: Sequence[str]) -> int:
    """Carry out what `argv` says; the exit status."""
    occupy_standard_fds()
    try:
        status = dispatch(list(argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        status = BROKEN_PIPE
        leave_stdout()
    except Exception as error:  # boundary: the user gets a sentence, not a traceback  # noqa: BLE001
        status = complain(error)
    if Console.current:
        Console.current.flush()
    return status


def dispatch(words: list[str]) -> int:
    """Call the verb that `words` begin with."""
    if not words or words[0] in ("--help", "-h") or words == ["help"]:
        print(overview())  # noqa: T201
        return 0
    if words[0] in ("--version", "-V"):
        print(__version__)  # noqa: T201
        return 0
    if words[0] not in VERBS:
        raise unknown_verb(words[0])
    return call(words[0], words[1:])


def call(verb: str, words: list[str]) -> int:
    from cyclopts import App, CycloptsError

    from ..core.errors import BadInput

    app = App(name="holdwater", help_format="markdown", version_flags=(), suppress_keyboard_interrupt=False)
    app.command(f"holdwater.cli.{verb}:{verb}", name=verb)
    try:
        status = app([verb, *words], exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise BadInput(one_line(error), f"`holdwater {verb} --help` shows what it takes") from None
    return status if isinstance(status, int) else 0


def overview() -> str:
    from .help import find_pages

    verbs = "\n".join(f"  {verb:<10} {what}" for verb, what in VERBS.items())
    pages = list(find_pages())
    topics = ",\n  ".join(", ".join(pages[at : at + 7]) for at in range(0, len(pages), 7))
    return f"""\
holdwater {__version__}: agent evaluations inside a fixed memory and disk budget, with nothing lost

Usage: holdwater VERB [ARGUMENTS]

{verbs}

Examples:
  holdwater run demo
  holdwater run suite.py:suite --agent suite.py:solve --out runs/mine
  holdwater show latest
  holdwater VERB --help
  holdwater help TOPIC

Topics: {topics}"""


def unknown_verb(word: str) -> Exception:
    from difflib import get_close_matches

    from ..core.errors import BadInput

    near = get_close_matches(word, VERBS, n=1)
    hint = f"did you mean `holdwater {near[0]}`?" if near else "`holdwater --help` lists the verbs"
    return BadInput(f"unknown verb: `{printable(word)}`", hint)


def one_line(error: Exception) -> str:
    """The message of a usage error, as all our messages are: no capital, no full stop."""
    from cyclopts import UnusedCliTokensError

    if isinstance(error, UnusedCliTokensError):
        unused = " ".join(error.unused_tokens or ())
        return f"unexpected argument: `{printable(unused)}`"
    text = printable(" ".join(str(error).split())) or type(error).__name__
    start, unfit, kind = text.removesuffix(".").partition('" into ')
    if unfit and kind in EXPECTED:
        value = start.replace('unable to convert "', "`")
        text = f"{value}`, expected {EXPECTED[kind]}"
    return text[0].lower() + text[1:].removesuffix(".")


def printable(text: str) -> str:
    """`text` as one line that cannot steer a terminal."""
    short = text if len(text) <= 500 else text[:500] + "..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in short)


def complain(error: Exception) -> int:
    """Say what went wrong on the real stderr; the exit status for it."""
    from ..core.errors import HoldwaterError

    console = Console.current or Console()
    if isinstance(error, HoldwaterError):
        console.say(f"error: {error.message}")
        status = error.exit_status
        hint = error.hint
    else:
        console.say(f"error: internal: {type(error).__name__}: {printable(str(error))}")
        status = 1
        hint = f"a bug in holdwater, or in a suite or an agent that it loaded; traceback: `{keep(error)}`"
    if hint:
        console.say(f"hint: {hint}")
    console.flush()
    return status


def keep(error: Exception) -> str:
    """Write the traceback to a file; its path."""
    import tempfile
    import traceback

    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="holdwater-", suffix=".traceback", delete=False, errors="replace"
        ) as file:
            file.write("".join(traceback.format_exception(error)))
            return file.name
    except OSError as failed:
        return f"not kept: {failed.strerror}"


def leave_stdout() -> None:
    """Let the interpreter's last flush of a pipe that nobody reads go nowhere."""
    import os

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
