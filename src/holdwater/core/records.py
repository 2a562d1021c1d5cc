"""The records that all packages share: instances, limits, attempts, verdicts, outcomes.

They are frozen and encodable, and have no behaviour beyond reading their own fields. Decisions are in
`policy.py` and `plan.py`, exchanges in `exchange.py`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from .limits import GiB as GiB
from .limits import LimitOverrides as LimitOverrides
from .limits import Limits as Limits
from .limits import MiB as MiB
from .record import Record as Record

LONGEST_ID = 512


class Network(StrEnum):
    """The network access of a sandbox."""

    GATEWAY = "gateway"  # only the gateway
    NONE = "none"
    OPEN = "open"  # everything that this machine can reach

    @classmethod
    def _missing_(cls, value: object) -> Network | None:
        return cls.OPEN if value == "host" else None  # the value's name before container sandboxes existed


class Health(Record, frozen=True):
    """A readiness check: the command must exit with 0 before any other command runs in the sandbox."""

    command: str
    interval: float = 5.0  # seconds between two tries
    timeout: float = 30.0  # for one try
    start_period: float = 0.0  # failures within it do not count
    retries: int = 3


class SandboxSpec(Record, frozen=True):
    """The initial state of a sandbox: image, user, environment, network.

    A process sandbox refuses a field that it cannot implement.
    """

    image: str | None = None  # a reference
    build: str | None = None  # a directory of this machine with a Dockerfile, used if no image is named
    build_timeout: float = 600.0  # seconds
    build_target: str = ""  # the stage to build; empty: the last one
    build_args: dict[str, str] = msgspec.field(default_factory=dict)
    workdir: str | None = None  # absolute; None: the image's own
    user: str | None = None  # name or number, the default for every command
    # `${NAME}` and `${NAME:-default}` are expanded when the sandbox starts.
    env: dict[str, str] = msgspec.field(default_factory=dict)
    directories: tuple[str, ...] = ()  # absolute paths that exist in the sandbox and are writable
    network: Network | None = None  # None: the run's setting
    health: Health | None = None
    processes: bool = True  # whether a process sandbox is acceptable

    def __post_init__(self) -> None:
        if self.build is None and (self.build_target or self.build_args):
            raise ValueError("`build_target` and `build_args` need `build`")

    @property
    def key(self) -> str:
        """Identifies the image before it is available; empty: the spec names no image."""
        if self.image or not (self.build_target or self.build_args):
            return self.image or self.build or ""
        arguments = (f"{name}={value}" for name, value in sorted(self.build_args.items()))
        return " ".join((self.build or "", self.build_target, *arguments))


class Instance(Record, frozen=True):
    """One problem."""

    id: str
    instruction: str = ""
    files: dict[str, Any] = msgspec.field(default_factory=dict)  # path in the sandbox -> str or bytes
    directory: str | None = None  # a directory on this machine that is copied into the sandbox
    setup: str | None = None  # a shell command, run before the agent acts
    grade: str | None = None  # a shell command: status 0 is a pass
    # Path below the command's `$HOLDWATER_TESTS` -> str or bytes.
    tests: dict[str, Any] = msgspec.field(default_factory=dict)
    solution: str | None = None  # a shell command that the oracle runs
    data: dict[str, Any] = msgspec.field(default_factory=dict)
    limits: LimitOverrides = LimitOverrides()
    start: SandboxSpec = SandboxSpec()
    grader: SandboxSpec | None = None  # a fresh sandbox for grading, if that uses another image
    refused: str = ""  # why it cannot run here: it fails with this message at once and is not retried
    # The field that requests an open network: refused unless the run's network is open.
    open_network: str = ""

    def __post_init__(self) -> None:
        check_id(self.id)
        for field, files in (("files", self.files), ("tests", self.tests)):
            for path, content in files.items():
                if not isinstance(content, str | bytes):
                    raise ValueError(
                        f"`{field}[{path!r}]` must be str or bytes, not {type(content).__name__}"
                    )


def check_id(name: str) -> None:
    """Raise ValueError unless `name` is non-empty, printable and short.

    Ids are data and never used as paths.
    """
    if not name:
        raise ValueError("`id` is empty")
    if len(name) > LONGEST_ID:
        raise ValueError(f"`id` has {len(name)} characters, at most {LONGEST_ID} are allowed")
    if not name.isprintable():
        raise ValueError(f"`id` has unprintable characters: {name[:80]!r}")


class FailureOrigin(StrEnum):
    """The component that a failure comes from. `core/failures.py` has the consequences."""

    AGENT = "agent"
    LIMIT = "limit"
    RESOURCE = "resource"
    MODEL = "model"
    IMAGE = "image"
    SANDBOX = "sandbox"
    GRADE = "grade"
    WORKER = "worker"
    BUDGET = "budget"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"
    RUN = "run"


class AttemptPhase(StrEnum):
    """The current phase of an attempt."""

    SETUP = "setup"
    ACTING = "acting"
    SALVAGE = "salvage"
    GRADING = "grading"
    SCORING = "scoring"  # waiting for the other members of its group, then scored with them
    CLOSING = "closing"


class AttemptFailure(Record, frozen=True):
    """The cause of a failure, in a sentence that a user can act on."""

    where: FailureOrigin
    kind: str  # a short word: `timeout`, `exit`, `exception`, `lost`, `crashed`, `poison`, ...
    message: str
    hint: str = ""
    phase: AttemptPhase | None = None
    again: bool = True  # whether a retry can succeed
    after: float = 0.0  # seconds to wait first (Retry-After)


class SkippedEntry(Record, frozen=True):
    """An entry that was not copied when its directory was taken out of a sandbox."""

    path: str  # relative to that directory
    reason: str
    link: str | None = None  # target of a symbolic link
    lost: bool = False  # whether file content is missing because of it

    def __str__(self) -> str:
        return f"`{self.path[:300]}`: {self.reason}"


class Grade(Record, frozen=True):
    """The suite's assessment of an attempt's work."""

    passed: bool
    score: float
    detail: str = ""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class ModelUsage(Record, frozen=True):
    """The usage of model calls, in integers, so that sums are exact in any order."""

    requests: int = 0
    input_tokens: int = 0  # all input tokens, including cached and written ones
    cached_tokens: int = 0  # read from the provider's cache
    written_tokens: int = 0  # written to the provider's cache, where that has its own price
    output_tokens: int = 0  # all output tokens, including reasoning
    reasoning_tokens: int = 0  # spent on reasoning, if the upstream counts them
    nanodollars: int = 0  # total cost of the requests whose cost is known
    priced: int = 0  # requests whose cost is known

    @property
    def cost(self) -> float | None:
        """US dollars; None while the cost of any request is unknown."""
        return self.nanodollars / 1e9 if self.priced >= self.requests else None

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def plus(self, other: ModelUsage) -> ModelUsage:
        return ModelUsage(
            requests=self.requests + other.requests,
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            written_tokens=self.written_tokens + other.written_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            nanodollars=self.nanodollars + other.nanodollars,
            priced=self.priced + other.priced,
        )


NO_USAGE = ModelUsage()  # omitted where records are written


class PhaseTimes(Record, frozen=True):
    """Seconds spent in each phase; `waited` is the part of acting spent waiting for a rate limit."""

    setup: float = 0.0
    acting: float = 0.0
    grading: float = 0.0
    waited: float = 0.0


class MemorySeries(Record, frozen=True):
    """The memory of a sandbox over time: the maximum of each step, from the start of its attempt."""

    step: float = 1.0  # seconds
    kib: tuple[int, ...] = ()


class Salvage(Record, frozen=True):
    """The work that an attempt left, as a file in the run's `artifacts/`."""

    name: str
    files: int
    bytes: int
    left_out: int = 0  # changed paths that are not in the file: too large in total, or unreadable


class KeptFile(Record, frozen=True):
    """A file in the run's `artifacts/`, with its size and digest at the time of writing."""

    name: str
    bytes: int
    digest: str = ""  # blake3, in hexadecimal; empty: written by an older version


class KeptWork(Record, frozen=True):
    """The work of an agent in a form that can be restored and graded without running the agent."""

    attempt: int  # the attempt that did the work
    failure: AttemptFailure | None = None  # failure of its acting phase
    salvage: KeptFile | None = None
    patch: KeptFile | None = None
    answer: KeptFile | None = None  # an answer that is too long for the verdict, as JSON
    lacks: str = ""  # why it cannot be restored completely; empty: it can
    steps: int = 1  # steps of the agent; only the last step can be graded again
    outside: int = 0  # changed paths outside the working directory; they are not kept, so only a pass counts


class Attempt(Record, frozen=True):
    """One try at one sample of an instance."""

    id: int
    instance: int  # the instance's row in the ledger
    sample: int
    number: int  # 1, 2, 3, ... within the sample, including retries
    round: int = 1  # the round of `--attempts` that this try belongs to
    scale: int = 1  # factor on the resources that the instance requested
    alone: bool = False  # runs in a worker of its own, because it is suspected of crashing workers
    regrades: int | None = None  # the attempt whose kept work this one grades, without running an agent
    group: int | None = None  # the order whose members are scored together
    crashes: int = 0  # workers that the sample crashed before while it ran alone in them


class ChildAttempt(Record, frozen=True):
    """The record of a child attempt.

    A child uses its parent's sandbox, model and lease, and ends before its parent.
    """

    name: str
    failure: AttemptFailure | None = None
    usage: ModelUsage = NO_USAGE
    exchanges: int = 0  # recorded with its parent's exchanges
    seconds: float = 0.0


class Verdict(Record, frozen=True):
    """The end of an attempt. Each attempt has exactly one."""

    attempt: int
    token: int
    failure: AttemptFailure | None = None
    grade: Grade | None = None
    answer: str | None = None  # as JSON; a long answer is a file of `kept`
    usage: ModelUsage = NO_USAGE
    times: PhaseTimes = PhaseTimes()
    salvage: Salvage | None = None
    exchanges: int = 0
    peak_memory: int = 0
    replayed_usage: ModelUsage = NO_USAGE  # of calls that were answered from the record, at no cost
    patch: int | None = None  # bytes of the patch in `artifacts/`; None: the suite takes no patch
    critic_satisfied: bool | None = None  # result of a user-defined critic; None: there is none
    children: tuple[ChildAttempt, ...] = ()
    group_scored: bool = False  # whether its grade comes from scoring its group
    kept: KeptWork | None = None  # None: the agent did not act
    version: str = ""  # of the policy that answered the last call, if it was reported
    memory: MemorySeries | None = None  # None: it ended within seconds, or is of an older version


class Outcome(Record, frozen=True):
    """The final result of one sample of an instance, chosen from its verdicts."""

    instance: int
    sample: int
    attempt: int
    kind: str  # `passed`, `failed`, or the failure's `FailureOrigin`
    score: float | None
    where: FailureOrigin | None = None  # origin of the underlying failure, if any


class CommandResult(Record, frozen=True):
    """The result of a command in a sandbox."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float = 0.0
    timed_out: bool = False
    truncated: bool = False  # whether output beyond the limit was discarded

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def output(self) -> str:
        return self.stdout + self.stderr
