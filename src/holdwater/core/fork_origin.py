"""The origin of a forked run: the attempt of another run that it repeats, and the turn up to which it does.

`conversation/forked_replies.py` gives the recorded replies again, `api/forking.py` makes such runs.
"""

from __future__ import annotations

from .records import AttemptFailure, AttemptPhase, FailureOrigin, Record

DRIFT = "drift"  # the kind of the failure of a branch that did not repeat its origin
ALLOWED = "`--drift` gives such a request its recorded reply all the same"
SEED_STRIDE = 1000  # between the seeds of two samples, and between those of two branches


class ForkOrigin(Record, frozen=True):
    """The recorded attempt that every attempt of a fork repeats up to a turn."""

    directory: str  # of the recorded run
    run: str  # its id
    instance: str
    sample: int
    number: int  # of the attempt, within the sample
    attempt: int  # its id
    turn: int  # the last repeated turn; 0: none is
    seed: int = 0  # of the attempt's own model calls
    say: str | None = None  # the model's reply in that turn, in place of the recorded one
    then_say: str | None = None  # added to the recorded reply of that turn
    drift: bool = False  # a request that differs gets its recorded reply all the same

    @property
    def place(self) -> str:
        """The origin in words."""
        turn = f"after turn {self.turn}" if self.turn else "from its start"
        sample = f" of sample {self.sample}" if self.sample else ""
        return f"attempt {self.number}{sample} of `{self.instance}` in run `{self.run}`, {turn}"


def make_drift_failure(message: str) -> AttemptFailure:
    """Return the failure of a branch that did not repeat its origin: it is no result of the agent."""
    return AttemptFailure(
        where=FailureOrigin.MODEL,
        kind=DRIFT,
        message=message,
        hint=ALLOWED,
        phase=AttemptPhase.ACTING,
        again=False,
    )
