"""The parts of a run that belong to the process of the command: signals, keys and the environment.

`holdwater --help` imports this module, so it imports as little as possible.
"""

from __future__ import annotations

from ..run.conductor.signals import INTERRUPTED as INTERRUPTED
from ..run.conductor.signals import CommandSignals as CommandSignals
from ..run.conductor.signals import disregard as disregard
from ..run.setup.keys import take_keys as take_keys


def read_variables() -> dict[str, str]:
    """Return the environment of this process without its keys."""
    from ..run.setup.config import read_environment

    return read_environment().inherited
