"""`holdwater run`: a suite, an agent, a model and budgets, from flags and a TOML file, to a run."""

# Annotations are objects here: another module's flags are made of these.
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from .console import Console
from .flags import Flag
from .settings import merged

if TYPE_CHECKING:
    from ..api import Prepared

CHOOSING = Group("What is run", sort_key=1)
TRYING = Group("How often it is tried", sort_key=2)
LIMITS = Group("Limits (seconds; sizes such as `512MiB`)", sort_key=3)
BUDGETS = Group("Budgets of model calls (US dollars)", sort_key=4)
MACHINE = Group("Where it runs", sort_key=5)


def _in(group: Group, text: str) -> Any:
    return Parameter(group=group, help=text, show_default=False, negative="")


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Common:
    """What a run and a server can both be told. Every flag can stand in a TOML file too."""

    agent: Annotated[
        str | None,
        _in(CHOOSING, "`bash`, `claude-code`, ... (see `holdwater agents`), `command` or `path.py:name`"),
    ] = None
    command: Annotated[
        str | None,
        _in(CHOOSING, "With `--agent command`: the program, with placeholders such as `{instruction}`"),
    ] = None
    model: Annotated[
        str | None, _in(CHOOSING, "The model's name; `OPENAI_API_KEY` and `OPENAI_BASE_URL` say where it is")
    ] = None
    base_url: Annotated[str | None, _in(CHOOSING, "The model's server, in place of `OPENAI_BASE_URL`")] = None
    retries: Annotated[int | None, _in(TRYING, "Further tries after an infrastructure failure (2)")] = None
    timeout: Annotated[float | None, _in(LIMITS, "For acting, from when the agent starts (3600)")] = None
    working_time: Annotated[
        float | None, _in(LIMITS, "For acting, without the time spent waiting for a rate limit")
    ] = None
    setup_timeout: Annotated[float | None, _in(LIMITS, "For set-up (300)")] = None
    grade_timeout: Annotated[float | None, _in(LIMITS, "For grading (600)")] = None
    sandbox_memory: Annotated[
        str | None, _in(LIMITS, "For each sandbox; a retry after hitting it gets twice as much")
    ] = None
    sandbox_disk: Annotated[
        str | None, _in(LIMITS, "For the files of each sandbox; a retry after hitting it gets twice as much")
    ] = None
    sandbox_cpus: Annotated[float | None, _in(LIMITS, "Cores that each sandbox may use at once")] = None
    sandbox_cpu_seconds: Annotated[
        float | None, _in(LIMITS, "CPU time of each sandbox's commands, in set-up, acting and grading each")
    ] = None
    sandbox_pids: Annotated[int | None, _in(LIMITS, "Processes of each sandbox at once (512)")] = None
    sandbox_output: Annotated[
        str | None, _in(LIMITS, "What each sandbox's commands print in set-up, acting and grading (256MiB)")
    ] = None
    memory: Annotated[
        str | None,
        _in(LIMITS, "The run's budget: attempts wait until they fit; what the container allows otherwise"),
    ] = None
    disk: Annotated[
        str | None, _in(LIMITS, "The budget for the run directory and scratch; the disk itself otherwise")
    ] = None
    disk_patience: Annotated[
        float | None, _in(LIMITS, "Seconds that a run waits for room on its disk before it stops (600)")
    ] = None
    worker_memory: Annotated[str | None, _in(LIMITS, "A worker above this is replaced (1GiB)")] = None
    max_requests: Annotated[int | None, _in(BUDGETS, "Model calls of an attempt")] = None
    max_input_tokens: Annotated[int | None, _in(BUDGETS, "Input tokens of an attempt")] = None
    max_output_tokens: Annotated[int | None, _in(BUDGETS, "Output tokens of an attempt")] = None
    max_cost: Annotated[float | None, _in(BUDGETS, "Cost of an attempt")] = None
    run_requests: Annotated[int | None, _in(BUDGETS, "Model calls of the run; reaching it stops the run")] = (
        None
    )
    run_tokens: Annotated[int | None, _in(BUDGETS, "Input and output tokens of the run")] = None
    run_cost: Annotated[float | None, _in(BUDGETS, "Cost of the run")] = None
    run_time: Annotated[float | None, _in(BUDGETS, "Seconds that the run may take, resumes included")] = None
    largest_request: Annotated[
        str | None, _in(BUDGETS, "Bytes of a model request, unpacked; a larger one is refused (256MiB)")
    ] = None
    rpm: Annotated[float | None, _in(BUDGETS, "Model calls a minute, over all workers")] = None
    tpm: Annotated[float | None, _in(BUDGETS, "Tokens a minute, over all workers")] = None
    prices: Annotated[
        str | None, _in(BUDGETS, "A TOML file with prices by model; see `holdwater help models`")
    ] = None
    sampling: Annotated[
        list[str] | None, _in(CHOOSING, "Imposed on every request: `temperature=0.7`; may be repeated")
    ] = None
    concurrency: Annotated[
        int | Literal["auto"] | None,
        _in(MACHINE, "Attempts at once, or `auto`: as many as the budget and the CPU allow (auto)"),
    ] = None
    ungoverned: Annotated[
        bool | None, _in(MACHINE, "Let no attempt wait for memory: it is only measured")
    ] = None
    workers: Annotated[
        int | None, _in(MACHINE, "Processes that host them; 0: none but this one (one a core)")
    ] = None
    sandbox: Annotated[
        str | None, _in(MACHINE, "Where agents act: `process` or `docker` (what the suite suggests)")
    ] = None
    image: Annotated[
        str | None, _in(MACHINE, "With `docker`: the image for instances that name none, as `debian:12`")
    ] = None
    mount: Annotated[
        list[str] | None,
        _in(MACHINE, "`tools:/opt/tools`: shown in sandboxes, read-only, its `bin` on PATH; may be repeated"),
    ] = None
    sandbox_root: Annotated[
        str | None,
        _in(MACHINE, "What of this machine a process sandbox shows: `system` (default) or `host`, all of it"),
    ] = None
    sandbox_read_only: Annotated[
        bool | None, _in(MACHINE, "With `docker`: nothing but the working directory can be written")
    ] = None
    network: Annotated[
        str | None, _in(MACHINE, "What a sandbox reaches: `gateway` (default), `none` or `open`")
    ] = None
    pass_env: Annotated[
        list[str] | None,
        _in(MACHINE, "A variable that a suite may ask for by `${NAME}`; may be repeated (none)"),
    ] = None
    images: Annotated[
        str | None, _in(MACHINE, "With containers: an `images.toml` by which instances get their images")
    ] = None
    scratch: Annotated[
        str | None, _in(MACHINE, "Where sandboxes keep their files; the run directory otherwise")
    ] = None
    keep: Annotated[
        str | None,
        _in(MACHINE, "Whose files stay when a sample is closed: `all` (default), `failures` or `none`"),
    ] = None
    silence: Annotated[
        float | None, _in(MACHINE, "Seconds without a sign of life after which a worker counts as hung (20)")
    ] = None
    recycle_after: Annotated[int | None, _in(MACHINE, "Attempts after which a worker is replaced (5000)")] = (
        None
    )
    suite_timeout: Annotated[
        float | None, _in(MACHINE, "Seconds without an instance after which a suite counts as hung (600)")
    ] = None
    backoff: Annotated[float | None, _in(MACHINE, "Seconds before the first retry; doubles (1)")] = None


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Flags(Common):
    """What only a run can be told: its instances, and how often each is tried."""

    only: Annotated[
        list[str] | None, _in(CHOOSING, "Only instances whose id matches this pattern; may be repeated")
    ] = None
    limit: Annotated[int | None, _in(CHOOSING, "Only the first so many instances")] = None
    shard: Annotated[str | None, _in(CHOOSING, "Only part i of n: `1/4`")] = None
    attempts: Annotated[int | None, _in(TRYING, "Goes at an instance until the critic is satisfied (1)")] = (
        None
    )
    critic: Annotated[
        str | None,
        _in(
            TRYING,
            "`grade`: it passed (default); `finished`; `finished-with-patch`; `patch`; `command:LINE`; "
            "`path.py:name`",
        ),
    ] = None
    samples: Annotated[int | None, _in(TRYING, "Independent samples of each instance, for pass@k (1)")] = None
    grace: Annotated[
        float | None, _in(MACHINE, "Seconds that running attempts get after the first Ctrl-C (30)")
    ] = None


def run(
    suite: str,
    /,
    *,
    flags: Flags = Flags(),  # noqa: B008 - frozen
    out: Path | None = None,
    config: Path | None = None,
    dry_run: Flag = False,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Run a suite with an agent.

    For example: `holdwater run demo`, or
    `holdwater run tasks.jsonl --agent bash --model gpt-5 --concurrency 30 --timeout 1800 --out runs/mine`.

    Exit status: 0 all settled, 1 settled with infrastructure failures left, 2 bad input, 3 interrupted and
    resumable, 4 stopped by a budget or a failure that hits every instance.

    Parameters
    ----------
    suite
        `demo`, `file.jsonl`, `path.py:name`, `module:name` or a plug-in.
    out
        The run's directory; `runs/<time>-<suite>` otherwise.
    config
        A TOML file with flags; those given here come first.
    dry_run
        Print what would happen, and do nothing.
    json
        Print the run's summary as one JSON document on stdout.
    quiet
        No display and no closing page.
    """
    console = Console.claim()
    from .. import api

    said = merged(flags, config)
    agent = _agent(said.pop("agent"), said.pop("command"))
    prepared = api.prepare(suite, agent, out, said)  # type: ignore[arg-type]
    if dry_run:
        return _rehearse(prepared, console, json)
    from .conduct import conducted

    return conducted(lambda around: api.start(prepared, around), json=json, quiet=quiet)


def _agent(agent: str | None, command: str | None) -> str | None:
    """`--agent command --command LINE` is the agent `command:LINE`; `--command` alone means the same."""
    from ..core.errors import BadInput

    if command is None:
        if agent == "command":
            raise BadInput(
                "`--agent command` needs `--command`", "for example `--command 'mytool {instruction}'`"
            )
        return agent
    if agent not in (None, "command"):
        raise BadInput(f"`--command` goes with `--agent command`, not with `{agent}`")
    return f"command:{command}"


def _rehearse(prepared: "Prepared", console: Console, json: bool) -> int:
    """Say what would happen."""
    import uvloop

    from ..api import check_start
    from ..run.source import Source

    async def look() -> tuple[list[str], int | None]:
        await check_start(prepared)
        source = Source(prepared.suite, prepared.config)
        try:
            first: list[str] = []
            while len(first) < 10 and (items := await source.take(10 - len(first))):
                first += [instance.id for instance, _ in items]
            return first, source.total
        finally:
            source.close()
            if source.error is not None:
                raise source.error

    first, total = uvloop.run(look())
    if json:
        console.data(
            {"directory": prepared.path, "config": prepared.config, "instances": total, "first": first}
        )
        return 0
    config, limits = prepared.config, prepared.config.limits
    lines = [
        f"would run suite `{config.suite}` with agent `{config.agent}` on model `{config.model or 'none'}`",
        f"instances: {'not known before it runs' if total is None else total}, "
        f"samples {config.samples}, attempts {config.attempts}, retries {config.retries}",
        f"first: {', '.join(first)}{', ...' if len(first) == 10 else ''}",
        f"at once: at most {config.slots} attempts in {config.workers} workers, as the budget allows",
        f"limits: set-up {limits.setup:g} s, acting {limits.acting:g} s, grading {limits.grading:g} s",
        f"directory: {prepared.path}",
    ]
    console.page("\n".join(lines))
    return 0
