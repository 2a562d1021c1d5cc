"""The record of an agent: its function, and the facts that a run needs before it starts.

`authoring.py` has the protocols of the sandbox and the model that the function receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

# (instance, sandbox, model) -> answer, plain or async. A function with a parameter `attempt` receives an
# `AttemptHandle`.
AgentFunction = Callable[..., Any]


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """A named `act` function, and the facts that a run needs before it starts."""

    name: str
    act: AgentFunction
    uses_model: bool = True
    needs_model: bool = False  # it is known to call the model: no instance can run without one
    solves: bool = False  # the oracle: the suite's `solve`, if there is one, runs in its place
    check: Callable[[], None] | None = None  # raises BadInput or RunFailed before anything is started
    description: str = ""
    paths: tuple[str, ...] = ()  # paths of this machine that its sandbox has to show
    notes: tuple[str, ...] = ()  # for the user, at the start of a run
    # Bytes that its program uses in the sandbox, and its code in the worker: the first estimates of a lease
    # without a declared limit. 0: unknown.
    memory: int = 0
    worker_memory: int = 0
    # Called in each worker before it takes attempts, for imports, with a directory for temporary files.
    prepare: Callable[[Path], None] | None = None
    # Returns the agent with the options of the run; raises BadInput for an invalid one. None: it has none.
    configure: Callable[[Mapping[str, Any]], Agent] | None = None
    options: Mapping[str, Any] = MappingProxyType({})  # its configured options, with absolute paths
