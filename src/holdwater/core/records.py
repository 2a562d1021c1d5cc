"""The records that every room speaks in: what was asked, what was tried, how it ended.

Frozen and encodable. No behaviour beyond reading themselves: decisions are in `policy.py` and `plan.py`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

MiB = 1024 * 1024
GiB = 1024 * MiB
LONGEST_ID = 512


class Record(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A frozen, typed value that can be written to disk or sent to a worker."""


class Network(StrEnum):
    """What a sandbox can reach."""

    GATEWAY = "gateway"  # the gateway, and nothing else
    NONE = "none"
    OPEN = "open"  # whatever this machine can

    @classmethod
    def _missing_(cls, value: object) -> Network | None:
        return cls.OPEN if value == "host" else None  # its name when sandboxes were processes alone


class Health(Record, frozen=True):
    """A command that says whether a sandbox is ready: it has to end with 0 before anyone acts in it."""

    command: str
    interval: float = 5.0  # seconds between two tries
    timeout: float = 30.0  # for one try
    start_period: float = 0.0  # failures within it do not count
    retries: int = 3


class Start(Record, frozen=True):
    """What a sandbox starts from, and as whom. What a process sandbox cannot give of it, it refuses."""

    image: str | None = None  # a reference
    build: str | None = None  # a directory of this machine with a `Dockerfile`, where no image is named
    build_timeout: float = 600.0  # seconds
    workdir: str | None = None  # absolute; the image's own otherwise
    user: str | None = None  # name or number, for every command that says nothing else
    env: dict[str, str] = {}  # `${NAME}` and `${NAME:-default}` are filled in when it starts
    directories: tuple[str, ...] = ()  # absolute: these are there, and can be written
    network: Network | None = None  # the run's otherwise
    health: Health | None = None
    processes: bool = True  # whether a process sandbox will do

    @property
    def key(self) -> str:
        """What its image is known by before it is there; empty: it names none."""
        return self.image or self.build or ""


class Limits(Record, frozen=True):
    """What one attempt may use. Seconds and bytes; each phase's time starts when that phase starts."""

    setup: float = 300.0
    acting: float = 3600.0
    working: float | None = None  # acting time less the time spent waiting for a rate limit
    grading: float = 600.0
    memory: int | None = None
    disk: int | None = None  # of its whole directory: working directory, home and temporary files
    pids: int | None = 512
    output: int = 256 * MiB  # all that its commands print in a phase
    cpus: float | None = None  # cores
    cpu_seconds: float | None = None  # CPU time of all its commands in a phase
    requests: int | None = None  # model calls; what follows is the budget of them all
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost: float | None = None  # US dollars
    lease: int | None = None  # bytes of memory where no limit was declared: it changes with time

    @property
    def held_to(self) -> int | None:
        """Bytes of memory that a sandbox may use as a whole."""
        return self.memory or self.lease

    def under(self, ask: Ask) -> Limits:
        """These limits with what the instance asks for put in their place."""
        return msgspec.structs.replace(self, **asked) if (asked := ask.said) else self

    def scaled(self, scale: int) -> Limits:
        """These limits with `scale` times the memory and disk: what a retry after a resource failure gets."""
        if scale == 1:
            return self
        return msgspec.structs.replace(
            self,
            memory=self.memory and self.memory * scale,
            disk=self.disk and self.disk * scale,
        )


class Ask(Record, frozen=True):
    """The limits that an instance sets for itself; what it leaves out comes from the run."""

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

    def under(self, other: Ask) -> Ask:
        """The same with what `other` says put in its place."""
        return msgspec.structs.replace(self, **other.said)

    @property
    def said(self) -> dict[str, Any]:
        """What it does not leave out."""
        return {f: value for f in self.__struct_fields__ if (value := getattr(self, f)) is not None}


class Instance(Record, frozen=True):
    """One problem."""

    id: str
    instruction: str = ""
    files: dict[str, Any] = {}  # path in the sandbox -> str or bytes
    directory: str | None = None  # a directory on this machine that is copied into the sandbox
    setup: str | None = None  # a shell command, run before the agent acts
    grade: str | None = None  # a shell command: status 0 is a pass
    tests: dict[str, Any] = {}  # path below `$HOLDWATER_TESTS` of that command -> str or bytes
    solution: str | None = None  # a shell command that the oracle runs
    data: dict[str, Any] = {}
    limits: Ask = Ask()
    start: Start = Start()
    grader: Start | None = None  # what grading begins anew from, where that is another image
    refused: str = ""  # why it cannot be tried here: it fails with this at once, and for good
    open_network: str = ""  # the field that asks for an open network: refused unless the run's is open

    def __post_init__(self) -> None:
        check_id(self.id)
        for field, files in (("files", self.files), ("tests", self.tests)):
            for path, content in files.items():
                if not isinstance(content, str | bytes):
                    raise ValueError(
                        f"`{field}[{path!r}]` must be str or bytes, not {type(content).__name__}"
                    )


def check_id(name: str) -> None:
    """Ids are data: any printable text, never a path, but short enough to read."""
    if not name:
        raise ValueError("`id` is empty")
    if len(name) > LONGEST_ID:
        raise ValueError(f"`id` has {len(name)} characters, at most {LONGEST_ID} are allowed")
    if not name.isprintable():
        raise ValueError(f"`id` has unprintable characters: {name[:80]!r}")


class Where(StrEnum):
    """Where a failure lies. What follows from it is in `core/failures.py`."""

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


class Phase(StrEnum):
    """Where in its life an attempt is."""

    SETUP = "setup"
    ACTING = "acting"
    SALVAGE = "salvage"
    GRADING = "grading"
    SCORING = "scoring"  # with its group: waiting for the others, then scored together
    CLOSING = "closing"


class Failure(Record, frozen=True):
    """What went wrong, in a sentence that a user can act on."""

    where: Where
    kind: str  # a short word: `timeout`, `exit`, `exception`, `lost`, `crashed`, `poison`, ...
    message: str
    hint: str = ""
    phase: Phase | None = None
    again: bool = True  # could the same try end otherwise?
    after: float = 0.0  # seconds to wait first (Retry-After)


class LeftOut(Record, frozen=True):
    """An entry of a directory that was taken out of a sandbox, and did not come out with it."""

    path: str  # below that directory
    reason: str
    link: str | None = None  # the target, if the entry is a symbolic link
    lost: bool = False  # whether the content of a file is missing with it

    def __str__(self) -> str:
        return f"`{self.path[:300]}`: {self.reason}"


class Grade(Record, frozen=True):
    """What the suite made of the work."""

    passed: bool
    score: float
    detail: str = ""
    metrics: dict[str, float] = {}


class Usage(Record, frozen=True):
    """What model calls used. All of it is whole numbers, so that sums are exact in any order."""

    requests: int = 0
    input_tokens: int = 0  # all of them, cached and written ones included
    cached_tokens: int = 0  # read from the provider's cache
    written_tokens: int = 0  # put into the provider's cache, where that has a price of its own
    output_tokens: int = 0  # all of them, those of reasoning included
    reasoning_tokens: int = 0  # spent on thoughts, where the upstream counts them
    nanodollars: int = 0  # what those requests cost whose cost is known
    priced: int = 0  # requests whose cost is known

    @property
    def cost(self) -> float | None:
        """US dollars; None while the cost of any request is unknown."""
        return self.nanodollars / 1e9 if self.priced >= self.requests else None

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def plus(self, other: Usage) -> Usage:
        return Usage(
            requests=self.requests + other.requests,
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            written_tokens=self.written_tokens + other.written_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            nanodollars=self.nanodollars + other.nanodollars,
            priced=self.priced + other.priced,
        )


NO_USAGE = Usage()  # this one is left out where records are written


class Times(Record, frozen=True):
    """Seconds that each phase took; `waited` is the part of acting spent waiting for a rate limit."""

    setup: float = 0.0
    acting: float = 0.0
    grading: float = 0.0
    waited: float = 0.0


class Salvage(Record, frozen=True):
    """The work that an attempt left, as a file in the run's `artifacts/`."""

    name: str
    files: int
    bytes: int
    left_out: int = 0  # changed paths that it does not hold: too large together, or not readable


class KeptFile(Record, frozen=True):
    """A file in the run's `artifacts/`, as it was written."""

    name: str
    bytes: int
    digest: str = ""  # blake3, in hexadecimal; empty: written by an older version


class KeptWork(Record, frozen=True):
    """The work of an agent, as it can be put back and graded without running the agent."""

    attempt: int  # that did the work
    failure: Failure | None = None  # how its acting ended
    salvage: KeptFile | None = None
    patch: KeptFile | None = None
    answer: KeptFile | None = None  # an answer that is too long for the verdict, as JSON
    lacks: str = ""  # why it cannot be put back whole; empty: it can
    steps: int = 1  # of the agent; no step before the last can be graded again
    outside: int = 0  # changed paths outside the working directory, which are not kept: only a pass counts


class Attempt(Record, frozen=True):
    """One try at one sample of an instance."""

    id: int
    instance: int  # the instance's row in the ledger
    sample: int
    number: int  # 1, 2, 3, ... within the sample, counting every try
    round: int = 1  # which of `--attempts` this try belongs to
    scale: int = 1  # how many times the resources that the instance asked for
    alone: bool = False  # a suspect: has a worker to itself
    regrades: int | None = None  # the attempt whose kept work this one grades; its own agent does not act
    group: int | None = None  # the order whose members are scored together
    crashes: int = 0  # workers that the sample took down before, while alone in them


class Child(Record, frozen=True):
    """A child attempt: it borrowed its parent's sandbox or model, spent its lease and ended before it."""

    name: str
    failure: Failure | None = None
    usage: Usage = NO_USAGE
    exchanges: int = 0  # in its parent's record
    seconds: float = 0.0


class Verdict(Record, frozen=True):
    """How an attempt ended. Exactly one each."""

    attempt: int
    token: int
    failure: Failure | None = None
    grade: Grade | None = None
    answer: str | None = None  # as JSON; a long one is a file of `kept`
    usage: Usage = NO_USAGE
    times: Times = Times()
    salvage: Salvage | None = None
    exchanges: int = 0
    peak_memory: int = 0
    saved: Usage = NO_USAGE  # what it did not use again: calls that were answered from the record
    patch: int | None = None  # bytes of the patch in `artifacts/`; None: the suite asks for none
    enough: bool | None = None  # what a critic of the user's own says; None: there is none
    children: tuple[Child, ...] = ()
    together: bool = False  # its grade comes from scoring its group
    kept: KeptWork | None = None  # None: the agent did not act


class Outcome(Record, frozen=True):
    """What became of one sample of an instance, chosen from its verdicts."""

    instance: int
    sample: int
    attempt: int
    kind: str  # `passed`, `failed`, or the failure's `Where`
    score: float | None
    where: Where | None = None  # the failure behind it, if any


class Exchange(Record, frozen=True):
    """One model request and its reply; of the request, what is new since its parent."""

    number: int  # 1, 2, 3, ... within the attempt
    parent: int | None  # the exchange whose messages this request begins with
    keep: int  # how many of the parent's messages it keeps
    append: tuple[msgspec.Raw, ...]  # the messages that follow
    head: msgspec.Raw | None  # every other key of the request; None: the same as the parent's
    reply: msgspec.Raw | None  # the reply's JSON, whole, also when it was streamed
    status: int
    dialect: str = "chat"
    streamed: bool = False
    usage: Usage = NO_USAGE
    error: str = ""
    started: float = 0.0  # seconds since the epoch
    seconds: float = 0.0
    identity: str = ""  # the same for the same request in whatever attempt
    saved: Usage = NO_USAGE  # in the place of `usage`, where an earlier attempt's reply was given again
    version: str = ""  # of the policy that answered, where it says
    by: str = ""  # the child attempt that asked; empty: the attempt itself
    # The pieces of a stream as a JSON array, in the dialect whose clients keep them apart (Gemini).
    chunks: msgspec.Raw | None = None


class CommandResult(Record, frozen=True):
    """How a command in a sandbox ended."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float = 0.0
    timed_out: bool = False
    truncated: bool = False  # more was printed than is kept

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def output(self) -> str:
        return self.stdout + self.stderr
