"""The command line: finds the verb, runs it, and turns an exception into a message and an exit status.

A verb is a function of a file with its name, or of the file that `HOMES` names. It imports its modules when
it is called, so that `holdwater --help` is instant.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..api.process import INTERRUPTED, CommandSignals, take_keys
from ..version import __version__
from .console import CommandConsole, occupy_standard_fds

VERBS = {
    "run": "Run a suite with an agent",
    "serve": "Serve rollouts to trainers, which order them over HTTP",
    "sandboxd": "Give sandboxes of this machine to runs on other machines",
    "resume": "Resume a run that was stopped or killed",
    "top": "Show the live display of a running run",
    "pause": "Pause a running run: no attempt starts, model calls are held",
    "unpause": "Continue a paused run",
    "stop": "Stop a running run, as Ctrl-C does",
    "set": "Change settings of a running run",
    "cancel": "End an instance of a running run for good",
    "retry": "Give an instance of a running run another round",
    "note": "Write a sentence into the ledger of a running run",
    "show": "Show the results of a run, or of one instance",
    "view": "Show runs in a browser",
    "search": "Find a text in names, failures, answers and transcripts",
    "transcript": "Print the conversation of an attempt",
    "compare": "Compare runs of one suite, with intervals",
    "audit": "Prove that nothing is missing from a run",
    "export": "Write a run's outcomes, attempts, exchanges or trajectories",
    "fork": "Repeat an attempt up to a turn, then go on with the model",
    "replay": "Run a run again with its recorded replies, without a model",
    "grade": "Grade existing predictions",
    "regrade": "Grade a run's work again without running the agent",
    "check": "Run oracle and nop on every instance of a suite, and name the faulty ones",
    "init": "Write an example suite or agent, and its test",
    "images": "Plan, build, show and audit the images that sandboxes start from",
    "prune": "Shrink or remove old runs; prints a preview first",
    "suites": "List the known suites",
    "agents": "List the known agents",
    "doctor": "Check this machine and report what limits a run",
    "help": "Show a page of the manual: `holdwater help TOPIC`",
    "version": "Print the version of holdwater",
}
HOMES = {  # verb -> its file, where that has another name
    **dict.fromkeys(("run", "grade", "resume", "regrade", "replay"), "runs"),
    **dict.fromkeys(("suites", "agents", "doctor", "version"), "machine"),
    **dict.fromkeys(("top", "pause", "unpause", "stop", "set", "cancel", "retry", "note"), "control"),
    "audit": "show",
}
BROKEN_PIPE = 141  # exit status of a shell for SIGPIPE: the reader closed the pipe, which is not an error


def command() -> int:
    """Run the command in this process, with its signal handlers; return the exit status."""
    status = INTERRUPTED
    try:
        take_keys()
        with CommandSignals():
            status = main(sys.argv[1:])
    except KeyboardInterrupt:
        pass  # just before or after `main`
    # If a `KeyboardInterrupt` ever left code that was executed from a string, as some imports do, Python
    # exits by SIGINT even if the exception was caught later. Executing other code from a string resets that.
    exec("")
    CommandSignals.ignore()
    return status


# Type names in usage errors -> words for users.
EXPECTED_VALUES = {
    "int": "a whole number",
    "float": "a number",
    "int|Literal[auto]|None": "a whole number or `auto`",
}


def main(argv: Sequence[str]) -> int:
    """Run the command line `argv`; return the exit status."""
    occupy_standard_fds()
    try:
        status = dispatch(list(argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        status = BROKEN_PIPE
        detach_stdout()
    except Exception as error:  # boundary: the user sees a message, not a traceback  # noqa: BLE001
        status = report_error(error)
    if CommandConsole.current:
        CommandConsole.current.flush()
    return status


def dispatch(words: list[str]) -> int:
    """Call the verb that is the first of `words`."""
    if not words or words[0] in ("--help", "-h") or words == ["help"]:
        print(overview())  # noqa: T201
        return 0
    if words[0] in ("--version", "-V"):
        print(__version__)  # noqa: T201
        return 0
    if words[0] not in VERBS:
        raise unknown_verb(words[0])
    return call_verb(words[0], words[1:])


def call_verb(verb: str, words: list[str]) -> int:
    from cyclopts import App, CycloptsError

    from ..core.errors import BadInput

    app = App(name="holdwater", help_format="markdown", version_flags=(), suppress_keyboard_interrupt=False)
    app.command(f"holdwater.cli.{HOMES.get(verb, verb)}:{verb}", name=verb)
    try:
        status = app(
            [verb, *attach_hyphens(words)],
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
    except CycloptsError as error:
        message, near = explain_usage(error)
        hint = f"`holdwater {verb} --help` lists its arguments"
        raise BadInput(message, f"did you mean `{near}`? {hint}" if near else hint) from None
    return status if isinstance(status, int) else 0


def attach_hyphens(words: list[str]) -> list[str]:
    """Write `--flag -` as `--flag=-`: a lone hyphen, for standard input, is no flag."""
    attached: list[str] = []
    for word in words:
        if word == "-" and attached and attached[-1].startswith("--") and "=" not in attached[-1]:
            attached[-1] += "=-"
        else:
            attached.append(word)
    return attached


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
    return BadInput(f"unknown verb: `{make_printable(word)}`", hint)


# Texts of usage errors in cyclopts -> ours.
USAGE_TEXTS = {
    r'command ".*" parameter (--\S+) requires an argument': r"missing value for \1",
    r'command ".*" parameter (\S+) requires an argument': r"missing argument: \1",
    r'unknown command "(.*?)"(\. .*)?': r"unknown command: `\1`",
    r'invalid value "(.*)" for (--\S+)\. Choose from:': r"invalid value for \2: `\1`, expected one of",
}


def explain_usage(error: Exception) -> tuple[str, str]:
    """Return the message of a usage error in our style, and the word that was probably meant."""
    import re

    from cyclopts import UnusedCliTokensError

    if isinstance(error, UnusedCliTokensError):
        unused = " ".join(error.unused_tokens or ())
        return f"unexpected argument: `{make_printable(unused)}`", ""
    text = make_printable(" ".join(str(error).split())) or type(error).__name__
    text = text[0].lower() + text[1:].removesuffix(".")
    near = re.search(r'\. Did you mean "?([^"?]*)"?\?', text)
    start, unfit, kind = text.partition('" into ')
    if unfit and kind in EXPECTED_VALUES:
        value = start.replace('unable to convert "', "`")
        text = f"{value}`, expected {EXPECTED_VALUES[kind]}"
    for theirs, ours in USAGE_TEXTS.items():
        text = re.sub(f"^{theirs}", ours, text)
    return text.partition(". Did you mean")[0], near[1] if near else ""


def make_printable(text: str) -> str:
    """Return `text` as one line without terminal control characters."""
    short = text if len(text) <= 500 else text[:500] + "..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in short)


def report_error(error: Exception) -> int:
    """Print the error to the real stderr; return its exit status."""
    from ..core.errors import HoldwaterError

    console = CommandConsole.current or CommandConsole()
    if isinstance(error, HoldwaterError):
        console.say(f"error: {error.message}")
        status = error.exit_status
        hint = error.hint
    else:
        console.say(f"error: internal: {type(error).__name__}: {make_printable(str(error))}")
        status = 1
        hint = (
            "a bug in holdwater, or in a suite or an agent that it loaded; "
            f"traceback: `{save_traceback(error)}`"
        )
    if hint:
        console.say(f"hint: {hint}")
    console.flush()
    return status


def save_traceback(error: Exception) -> str:
    """Write the traceback to a file; return its path."""
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


def detach_stdout() -> None:
    """Point stdout to /dev/null: the interpreter's last flush would fail on a pipe without a reader."""
    import os

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
