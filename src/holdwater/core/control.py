"""The requests that control a running run, and the reply: one line of JSON each, on the run's own socket.

`run/conductor/control_socket.py` listens, `run/conductor/control.py` acts, `api/control.py` is the client.
"""

from __future__ import annotations

import msgspec

from .records import Record
from .summary import RunSummary

CONTROL_SOCKET = "control.sock"  # in the run directory
EVENT_PREFIX = "control."  # of the kinds of events; a verb follows
PAUSE_EVENT, UNPAUSE_EVENT = f"{EVENT_PREFIX}pause", f"{EVENT_PREFIX}unpause"
WATCH_EVENT = f"{EVENT_PREFIX}top"
LONGEST_LINE = 1 << 20  # bytes of a request
LONGEST_NOTE = 10_000  # characters


class ControlRequest(Record, frozen=True, tag=True, tag_field="verb"):
    """A request to the conductor of a run."""


class WatchRun(ControlRequest, frozen=True, tag="top"):
    """Send the run's summary. A display sends this again and again: nothing is queued for a slow one."""


class PauseRun(ControlRequest, frozen=True, tag="pause"):
    """Start no attempt and hold new model calls until `UnpauseRun`."""


class UnpauseRun(ControlRequest, frozen=True, tag="unpause"):
    """End the pause."""


class StopConductor(ControlRequest, frozen=True, tag="stop"):
    """Do as on Ctrl-C: drain, and end at once the second time."""

    now: bool = False  # end at once


class ChangeRun(ControlRequest, frozen=True, tag="set"):
    """Change settings of the run, and its record for later resumes."""

    settings: dict[str, str]  # `concurrency` -> `40`


class CancelInstance(ControlRequest, frozen=True, tag="cancel"):
    """End the open samples of an instance for good."""

    instance: str
    sample: int | None = None  # None: all samples


class RetryInstance(ControlRequest, frozen=True, tag="retry"):
    """Give the samples of an instance another round."""

    instance: str
    sample: int | None = None  # None: all samples


class AddNote(ControlRequest, frozen=True, tag="note"):
    """Write a sentence of the user into the ledger."""

    text: str


AnyRequest = (
    WatchRun | PauseRun | UnpauseRun | StopConductor | ChangeRun | CancelInstance | RetryInstance | AddNote
)


class ControlReply(Record, frozen=True):
    """The reply to a request: what was done, or why it was refused."""

    done: str = ""  # a sentence
    changed: bool = True  # False: the run was in the requested state already
    refused: str = ""  # why; empty: it was not
    hint: str = ""
    summary: RunSummary | None = None  # the reply to `WatchRun`


def describe_sender(user: str, uid: int, pid: int) -> str:
    """Return who sent a request, as events name it."""
    return f"by {user} (uid {uid}, pid {pid})"


# Created at import: msgspec crashes if two threads use a type for the first time concurrently.
REQUESTS = msgspec.json.Decoder(AnyRequest)
REPLIES = msgspec.json.Decoder(ControlReply)
