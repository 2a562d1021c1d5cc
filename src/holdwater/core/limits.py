"""The resources that an attempt may use, and an instance's own limits in place of the run's.

Sizes are in bytes: `parse_size` reads `512MiB`, `compute_headroom` says how much of a disk is kept free.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from .options import ConfigOption, OptionGroup
from .record import Record

LIMITS, BUDGETS = OptionGroup.LIMITS, OptionGroup.BUDGETS
MiB = 1024 * 1024
GiB = 1024 * MiB
MOST_HEADROOM = 128 * MiB
LEAST_HEADROOM = 2 * MiB
HEADROOM_PART = 50  # a small disk or budget keeps one part in this many free
UNITS = {"": 1, "k": 1024, "m": MiB, "g": GiB, "t": 1024 * GiB}


def parse_size(text: str) -> int | None:
    """Return the bytes of `512MiB`, `8GiB`, `1.5g` or `1000000`; None if `text` is not a size."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    return int(float(match[1]) * UNITS[match[2]]) if match else None


def compute_headroom(total: int) -> int:
    """Return the bytes to keep free on a disk of `total` bytes."""
    return min(MOST_HEADROOM, max(LEAST_HEADROOM, total // HEADROOM_PART))


class Limits(Record, frozen=True):
    """The resources that one attempt may use, in seconds and bytes.

    The time of a phase starts with the phase.
    """

    acting: Annotated[
        float,
        ConfigOption(
            LIMITS,
            "For acting, from when the agent starts (3600)",
            name="timeout",
            resume="Time limit for acting, in seconds",
        ),
    ] = 3600.0
    # Acting time without the time spent waiting for a rate limit.
    working: Annotated[
        float | None,
        ConfigOption(
            LIMITS, "For acting, without the time spent waiting for a rate limit", name="working_time"
        ),
    ] = None
    setup: Annotated[float, ConfigOption(LIMITS, "For set-up (300)", name="setup_timeout")] = 300.0
    grading: Annotated[float, ConfigOption(LIMITS, "For grading (600)", name="grade_timeout")] = 600.0
    memory: Annotated[
        int | None,
        ConfigOption(
            LIMITS,
            "For each sandbox; a retry after hitting it gets twice as much",
            name="sandbox_memory",
            size=True,
            positive=True,
        ),
    ] = None
    # For its whole directory: working directory, home and temporary files.
    disk: Annotated[
        int | None,
        ConfigOption(
            LIMITS,
            "For the files of each sandbox; a retry after hitting it gets twice as much",
            name="sandbox_disk",
            size=True,
            positive=True,
        ),
    ] = None
    cpus: Annotated[
        float | None,
        ConfigOption(LIMITS, "Cores that each sandbox may use at once", name="sandbox_cpus", positive=True),
    ] = None
    # CPU time of all its commands in one phase.
    cpu_seconds: Annotated[
        float | None,
        ConfigOption(
            LIMITS,
            "CPU time of each sandbox's commands, in set-up, acting and grading each",
            name="sandbox_cpu_seconds",
            positive=True,
        ),
    ] = None
    pids: Annotated[
        int | None,
        ConfigOption(LIMITS, "Processes of each sandbox at once (512)", name="sandbox_pids", positive=True),
    ] = 512
    # Total output of its commands in one phase.
    output: Annotated[
        int,
        ConfigOption(
            LIMITS,
            "Output of each sandbox's commands in set-up, acting and grading each (256MiB)",
            name="sandbox_output",
            size=True,
            positive=True,
        ),
    ] = 256 * MiB
    requests: Annotated[
        int | None, ConfigOption(BUDGETS, "Model calls of an attempt", name="max_requests", positive=True)
    ] = None
    input_tokens: Annotated[
        int | None,
        ConfigOption(BUDGETS, "Input tokens of an attempt", name="max_input_tokens", positive=True),
    ] = None
    output_tokens: Annotated[
        int | None,
        ConfigOption(BUDGETS, "Output tokens of an attempt", name="max_output_tokens", positive=True),
    ] = None
    cost: Annotated[
        float | None,
        ConfigOption(
            BUDGETS,
            "Cost of an attempt",
            name="max_cost",
            positive=True,
            resume="The limit of an attempt's cost, in US dollars",
        ),
    ] = None
    lease: int | None = None  # bytes of memory if no limit was declared; it changes over time

    @property
    def memory_limit(self) -> int | None:
        """Bytes of memory that the whole sandbox may use."""
        return self.memory or self.lease

    def with_overrides(self, ask: LimitOverrides) -> Limits:
        """Return these limits with the instance's own limits applied."""
        return msgspec.structs.replace(self, **asked) if (asked := ask.explicit_values) else self

    def scale_by(self, scale: int) -> Limits:
        """Return these limits with `scale` times the memory and disk.

        A retry after a resource failure gets these.
        """
        if scale == 1:
            return self
        return msgspec.structs.replace(
            self,
            memory=self.memory and self.memory * scale,
            disk=self.disk and self.disk * scale,
        )


class LimitOverrides(Record, frozen=True):
    """The limits that an instance sets for itself; missing ones come from the run."""

    setup: float | None = None
    acting: float | None = None
    working: float | None = None
    grading: float | None = None
    memory: int | None = None
    disk: int | None = None
    pids: int | None = None
    output: int | None = None
    cpus: float | None = None
    cpu_seconds: float | None = None
    requests: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost: float | None = None

    def merge(self, other: LimitOverrides) -> LimitOverrides:
        """Return these overrides with those of `other` on top."""
        return msgspec.structs.replace(self, **other.explicit_values)

    @property
    def explicit_values(self) -> dict[str, Any]:
        """The limits that are set."""
        return {f: value for f in self.__struct_fields__ if (value := getattr(self, f)) is not None}
