"""Controls a running run from another process: each call sends one request to the run's own socket.

The conductor acts (`run/conductor/control.py`) and writes each request into the ledger.
"""

from __future__ import annotations

from pathlib import Path

from ..core.control import (
    AddNote,
    CancelInstance,
    ChangeRun,
    PauseRun,
    RetryInstance,
    StopConductor,
    UnpauseRun,
)
from ..core.control import ControlReply as ControlReply
from ..run.conductor.control_client import ControlConnection as ControlConnection
from ..run.conductor.control_client import explain_absence as explain_absence
from ..run.conductor.control_client import send_request


def pause(run: str | Path) -> ControlReply:
    """Pause a run: no attempt starts, new model calls are held, and all clocks of attempts stop."""
    return send_request(run, PauseRun())


def unpause(run: str | Path) -> ControlReply:
    """Continue a paused run."""
    return send_request(run, UnpauseRun())


def stop(run: str | Path, *, now: bool = False) -> ControlReply:
    """Stop a run as Ctrl-C does; the second time, or with `now`, it ends at once."""
    return send_request(run, StopConductor(now=now))


def change(run: str | Path, **settings: object) -> ControlReply:
    """Change settings of a running run, such as `concurrency=40` or `memory="16GiB"`."""
    return send_request(run, ChangeRun(settings={name: str(value) for name, value in settings.items()}))


def cancel(run: str | Path, instance: str, *, sample: int | None = None) -> ControlReply:
    """End the open samples of an instance for good: their outcome is `cancelled`, without a score."""
    return send_request(run, CancelInstance(instance=instance, sample=sample))


def retry(run: str | Path, instance: str, *, sample: int | None = None) -> ControlReply:
    """Give an instance another round, also if it has ended."""
    return send_request(run, RetryInstance(instance=instance, sample=sample))


def note(run: str | Path, text: str) -> ControlReply:
    """Write a sentence into the ledger of a running run."""
    return send_request(run, AddNote(text=text))
