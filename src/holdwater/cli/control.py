"""`holdwater top`, `pause`, `unpause`, `stop`, `set`, `cancel`, `retry` and `note`: control a running run."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..core.errors import BadInput
from .console import CommandConsole
from .flags import Flag, InstanceId, LatestRun, NamedRun, ReplyJson, SampleNumber

if TYPE_CHECKING:
    from ..api.control import ControlConnection, ControlReply

LATEST = "latest"
LOOK_EVERY = 0.2  # seconds
QUIT = "q"


def top(run: LatestRun = None, /, *, json: Flag = False) -> int:
    """Show the live display of a running run in this terminal; `q` or Ctrl-C leaves it.

    The run goes on; any number of terminals can show it. For example: `holdwater top runs/mine`.

    Parameters
    ----------
    json
        Print the present summary as one JSON document, and leave.
    """
    from ..api.control import ControlConnection

    console = CommandConsole()
    with ControlConnection(run or LATEST) as connection:
        if json:
            console.write_json(connection.summary())
        else:
            show_display(connection, console)
    return 0


def show_display(connection: ControlConnection, console: CommandConsole) -> None:
    """Show the display until the user leaves it or the run ends."""
    from ..api.control import explain_absence
    from ..view.live_display import LiveDisplay

    connection.summary()  # raises before the terminal changes
    display = LiveDisplay(lambda: connection, console.say, console.terminal)
    display.start()
    try:
        with read_keys() as wait_for_key:
            while not connection.over and wait_for_key(LOOK_EVERY) != QUIT:
                continue
    except KeyboardInterrupt:
        pass  # ends the display, not the run
    finally:
        display.stop()
        console.flush()
    if connection.over:
        console.say(explain_absence(connection.directory).message)
        console.flush()


@contextmanager
def read_keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits so many seconds for a key; the terminal is restored afterwards."""
    stdin = sys.stdin.fileno()
    if not os.isatty(stdin):
        yield wait_without_keys
        return
    before = termios.tcgetattr(stdin)

    def wait_for_key(seconds: float) -> str:
        if not select.select([stdin], [], [], seconds)[0]:
            return ""
        return os.read(stdin, 1).decode(errors="replace") or QUIT  # nothing: the terminal is gone

    tty.setcbreak(stdin)
    try:
        yield wait_for_key
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def wait_without_keys(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def pause(run: LatestRun = None, /, *, json: ReplyJson = False) -> int:
    """Pause a running run: no attempt starts, and new model calls are held until `holdwater unpause`.

    Model calls in flight finish, sandboxes stay, and the clocks of attempts and of `--run-time` stop.
    For example: `holdwater pause runs/mine`.
    """
    from ..api import control

    return print_reply("pause", control.pause(run or LATEST), json=json)


def unpause(run: LatestRun = None, /, *, json: ReplyJson = False) -> int:
    """Continue a paused run. For example: `holdwater unpause runs/mine`."""
    from ..api import control

    return print_reply("unpause", control.unpause(run or LATEST), json=json)


def stop(run: LatestRun = None, /, *, now: Flag = False, json: ReplyJson = False) -> int:
    """Stop a running run as Ctrl-C in its terminal does: it drains, and ends at once the second time.

    `holdwater resume` continues it. For example: `holdwater stop runs/mine`.

    Parameters
    ----------
    now
        End the run at once.
    """
    from ..api import control

    return print_reply("stop", control.stop(run or LATEST, now=now), json=json)


def set(run: NamedRun, /, *settings: str, json: ReplyJson = False) -> int:
    """Change settings of a running run, from now on and for later resumes.

    The settings are those of `holdwater resume`: `concurrency`, `memory`, `disk`, `timeout`, `attempts`,
    `retries`, `max-cost`, `rpm`, `tpm`, `run-requests`, `run-tokens`, `run-cost` and `run-time`. Limits of
    attempts hold for attempts that start later.

    For example: `holdwater set runs/mine concurrency=40 memory=16GiB max-cost=20`.

    Parameters
    ----------
    settings
        Settings as `NAME=VALUE`.
    """
    from ..api import control

    return print_reply("set", control.change(run, **parse_settings(settings)), json=json)


def cancel(
    run: NamedRun, instance: InstanceId, /, *, sample: SampleNumber = None, json: ReplyJson = False
) -> int:
    """End the open samples of an instance for good: their outcome is `cancelled`, without a score.

    A running attempt ends, and its work is kept. For example: `holdwater cancel runs/mine add-1`.
    """
    from ..api import control

    return print_reply("cancel", control.cancel(run, instance, sample=sample), json=json)


def retry(
    run: NamedRun, instance: InstanceId, /, *, sample: SampleNumber = None, json: ReplyJson = False
) -> int:
    """Give an instance of a running run another round, also if it has ended or passed.

    A running attempt ends first. The outcome stays the best verdict of all rounds.
    For example: `holdwater retry runs/mine add-1`.
    """
    from ..api import control

    return print_reply("retry", control.retry(run, instance, sample=sample), json=json)


def note(run: NamedRun, text: str, /, *, json: ReplyJson = False) -> int:
    """Write a sentence into the ledger of a running run, with your name and the time.

    For example: `holdwater note runs/mine "the provider is slow since noon"`.

    Parameters
    ----------
    text
        The sentence.
    """
    from ..api import control

    return print_reply("note", control.note(run, text), json=json)


def parse_settings(words: Sequence[str]) -> dict[str, str]:
    """Return settings such as `concurrency=40` by name."""
    settings: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise BadInput(f"a setting must look like `concurrency=40`: `{word[:200]}`")
        settings[name.removeprefix("--")] = value
    return settings


def print_reply(verb: str, reply: ControlReply, *, json: bool) -> int:
    from rich.text import Text

    data = {"verb": verb, "done": reply.done, "changed": reply.changed}
    CommandConsole().write_result(data, lambda: Text(reply.done), json=json)
    return 0
